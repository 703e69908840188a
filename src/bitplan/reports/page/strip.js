// The whole network at a glance: one bar per layer, A above, B mirrored below, links and differences between.

const strip = { bars: { a: [], b: [] }, diffs: [], full: 0, lane: 0 };

/** Where the bars go, with the letters of the methods beside them. */
function stripFrame() {
  const letters = data.methods.length > 1 ? h('div', { class: 'letters', 'aria-hidden': 'true' }, ['A', 'B'].map((letter) => h('span', { class: 'letter' }, letter))) : null;
  return h('div', { class: 'strip' }, letters, h('div', { id: 'strip' }));
}

function drawStrip(width) {
  const two = data.methods.length > 1;
  const full = layers.length > MANY ? 70 : 84;
  const lane = 26;
  const step = width / layers.length;
  const gap = step > 5 ? Math.min(3, step * 0.2) : 0;
  const svg = s('svg', { viewBox: `0 0 ${width} ${full + lane + (two ? full : 0)}`, class: layers.length > MANY ? 'many' : null, 'aria-hidden': 'true' });
  Object.assign(strip, { full, lane, step, svg, bars: { a: [], b: [] }, diffs: [] });
  layers.forEach((layer, index) => {
    const size = { x: index * step + gap / 2, width: Math.max(0.6, step - gap), rx: Math.min(2, step / 6) };
    for (const side of two ? ['a', 'b'] : ['a']) {
      strip.bars[side][index] = s('rect', { ...size, y: side === 'a' ? full : full + lane, height: 0 });
      svg.append(strip.bars[side][index]);
    }
    if (two) {
      const middle = (index + 0.5) * step;
      const half = Math.min(4.5, Math.max(1, step * 0.45));
      strip.diffs[index] = s('path', { class: 'diff', visibility: 'hidden', d: `M${middle} ${full + lane - 10}l${half} 4.5l${-half} 4.5l${-half} -4.5Z` });
      svg.append(strip.diffs[index]);
    }
  });
  drawLinks(svg, full, step);
  strip.outline = s('rect', { class: 'picked', visibility: 'hidden', y: 1, height: full + lane + (two ? full : 0) - 2, rx: 3 });
  svg.append(strip.outline);
  svg.addEventListener('pointermove', (event) => stripTip(event));
  svg.addEventListener('pointerleave', hideTip);
  svg.addEventListener('click', (event) => { const layer = layerUnder(event); if (layer) choose(layer.place, null); });
  byId('strip').replaceChildren(svg);
  if (view.drawn.a !== null) groups.forEach((_, index) => paintGroup(index, view.drawn));
  paintStripState();
}

/** A bracket under the layers that are linked. */
function drawLinks(svg, full, step) {
  const places = new Map(layers.map((layer, index) => [layer.place, index]));
  for (const group of groups.filter((one) => one.layers.length > 1)) {
    const xs = group.layers.map((layer) => (places.get(layer[5]) + 0.5) * step);
    const ends = xs.map((x) => `M${x} ${full + 3}v5`).join('');
    svg.append(s('path', { class: 'link', 'stroke-width': step > 3 ? 1.6 : 0.6, d: `${ends}M${Math.min(...xs)} ${full + 8}H${Math.max(...xs)}` }));
  }
}

function layerUnder(event) {
  const box = strip.svg.getBoundingClientRect();
  return layers[Math.floor(((event.clientX - box.left) / box.width) * layers.length)];
}

function stripTip(event) {
  const layer = layerUnder(event);
  if (!layer) return;
  const shown = [precisionOf(layer.group, view.drawn.a).name];
  if (view.b !== NONE) shown.push(precisionOf(layer.group, view.drawn.b).name);
  const { fixed } = groups[layer.group];
  tipAt(event.clientX, event.clientY, [layer.name, shown.length > 1 ? `A ${shown[0]}, B ${shown[1]}` : shown[0], ...(fixed ? [`fixed: ${fixed.why}`] : [])]);
}

/** The bars of a group's layers at their precision. */
function paintStrip(group, sides, unlike) {
  if (!strip.svg) return;
  for (const index of indexesOf(group)) {
    for (const side of ['a', 'b']) {
      const bar = strip.bars[side][index];
      if (!bar) continue;
      const height = sides[side] ? (strip.full * sides[side].w) / mostBits : 0;
      bar.setAttribute('height', height);
      if (side === 'a') bar.setAttribute('y', strip.full - height);
      bar.dataset.tone = sides[side] ? sides[side].tone : 'fixed';
    }
    if (strip.diffs[index]) strip.diffs[index].setAttribute('visibility', unlike ? 'visible' : 'hidden');
  }
}

let indexes = null;
function indexesOf(group) {
  if (!indexes) {
    indexes = groups.map(() => []);
    layers.forEach((layer, index) => indexes[layer.group].push(index));
  }
  return indexes[group];
}

/** The frame around the chosen layer, and no empty half where there is no B. */
function paintStripState() {
  if (!strip.svg) return;
  const two = view.b !== NONE;
  const width = strip.svg.viewBox.baseVal.width;
  const height = strip.full + strip.lane + (two ? strip.full : 0);
  strip.svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  strip.outline.setAttribute('height', height - 2);
  byId('strip').parentElement.classList.toggle('single', !two);
  const index = view.selected === null ? -1 : layers.findIndex((layer) => layer.place === view.selected.place);
  strip.outline.setAttribute('visibility', index < 0 ? 'hidden' : 'visible');
  if (index >= 0) {
    strip.outline.setAttribute('x', Math.max(1, index * strip.step - 1));
    strip.outline.setAttribute('width', strip.step + 2);
  }
}
