// One layer: what it is, the histogram of its weights with the entropy, and its gain by every method.

/** Choose a layer by its place in the graph; `row` is where the reader came from. */
function choose(place, row) {
  view.selected = layers.find((layer) => layer.place === place);
  document.querySelectorAll('.layer[aria-pressed="true"]').forEach((other) => other.setAttribute('aria-pressed', 'false'));
  const own = row || document.querySelector(`.layer[data-layer="${place}"]`);
  own.setAttribute('aria-pressed', 'true');
  if (row) focusRow(row);
  else own.scrollIntoView({ block: 'nearest' });
  placeDetail(own);
  drawDetail();
  paintStripState();
}

/** Beside the list on a wide screen, below the chosen row on a narrow one. */
function placeDetail(row) {
  const detail = byId('detail');
  if (narrow.matches) row.closest('li').append(detail);
  else document.querySelector('.explorer').append(detail);
}

function closeDetail() {
  const row = document.querySelector('.layer[aria-pressed="true"]');
  if (row) { row.setAttribute('aria-pressed', 'false'); focusRow(row); }
  view.selected = null;
  const detail = byId('detail');
  detail.className = 'detail empty';
  detail.replaceChildren('Choose a layer to see its weights and what every method says about it.');
  paintStripState();
}

function drawDetail() {
  const layer = view.selected;
  const group = groups[layer.group];
  const detail = byId('detail');
  detail.className = 'detail';
  const close = h('button', { type: 'button', class: 'close', 'aria-label': 'Close', click: closeDetail }, '×');
  const others = group.layers.filter((one) => one[0] !== layer.name).map((one) => one[0]);
  const now = [`${precisionOf(layer.group, view.drawn.a).name}${view.b === NONE ? '' : ` (A), ${precisionOf(layer.group, view.drawn.b).name} (B)`}`];
  const facts = [
    ['precision', group.fixed ? `${group.fixed.name}, fixed: ${group.fixed.why}` : `${now[0]} at ${data.track.stops[view.stop][0]}`],
    ['kind', `${layer.kind}, ${layer.inputs.toLocaleString('en')} inputs`],
    ['size', `${layer.weights.toLocaleString('en')} weights, ${layer.macs.toLocaleString('en')} MACs`],
    others.length ? ['linked to', others.join(', ')] : null,
  ].filter(Boolean);
  detail.replaceChildren(close, h('h3', {}, layer.name), h('dl', {}, facts.flatMap(([what, value]) => [h('dt', {}, what), h('dd', {}, value)])), ...weightsOf(layer), ...gainsOf(layer.group));
}

/** The paper's figure at the precision that each side gives the layer now: how often each code occurs. */
function weightsOf(layer) {
  const found = data.histograms && data.histograms.layers[layer.name];
  if (!found) return [h('p', { class: 'note' }, noHistogram(layer))];
  return [...sidesByBits(layer, found)].flatMap(([bits, sides], index) => {
    const [counts, entropy] = found[bits];
    return [aboutCodes(bits, entropy, sides, index), codeBars(bits, counts, entropy, index)];
  });
}

/** Weight bits → the sides that give them; where there is no plan, the precision that was counted. */
function sidesByBits(layer, found) {
  const sides = view.b === NONE ? ['a'] : ['a', 'b'];
  const shown = new Map();
  for (const side of sides) {
    const { w } = precisionOf(layer.group, view.drawn[side]);
    const bits = String(w) in found ? w : data.histograms.bits;
    shown.set(bits, [...(shown.get(bits) || []), side]);
  }
  return shown;
}

/** What the codes carry: counted at the highest choice, derived from that below it. */
function aboutCodes(bits, entropy, sides, index) {
  const top = data.histograms.bits;
  const who = view.b === NONE || sides.length > 1 ? '' : ` (${sides[0].toUpperCase()})`;
  const id = index ? `entropy-${index}` : 'entropy';
  if (bits === top) {
    const room = entropy < 0.6 * top ? ', so it has room to be lowered' : '';
    return h('p', { class: 'note' }, `Weights as ${bits}-bit codes${who}: they carry `, h('b', { id }, `${entropy.toFixed(3)} bits`), ` of ${bits} each${room}.`);
  }
  return h('p', { class: 'note' }, `Weights as ${bits}-bit codes${who}, as training at this precision starts: they carry `, h('b', { id }, `about ${entropy.toFixed(2)} bits`), ` of ${bits} each (from the ${top}-bit codes).`);
}

function codeBars(bits, counts, entropy, index) {
  const whole = counts.reduce((sum, count) => sum + count, 0) || 1;
  const most = Math.max(...counts);
  const [width, height] = [340, 150];
  const step = (width - 8) / counts.length;
  const svg = s('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `Histogram of ${counts.length} codes of ${bits} bits, entropy ${entropy.toFixed(bits === data.histograms.bits ? 3 : 2)} bits`, id: index ? `histogram-${index}` : 'histogram', 'data-bits': bits });
  counts.forEach((count, place) => {
    const tall = (count / (most || 1)) * (height - 42);
    svg.append(s('rect', { x: 4 + place * step + step * 0.06, width: step * 0.88, y: height - 20 - tall, height: tall, fill: 'var(--m0)', rx: Math.min(2, step / 5) }));
  });
  const codes = 2 ** bits;
  const under = (code) => 4 + (width - 8) * ((codes / 2 + code + 0.5) / codes);
  const label = (code, text, anchor) => s('text', { x: codes > 32 && anchor !== 'middle' ? (anchor === 'start' ? 4 : width - 4) : under(code), y: height - 5, 'text-anchor': codes > 32 ? anchor : 'middle' }, text);
  svg.append(s('line', { class: 'axis', x1: 4, x2: width - 4, y1: height - 20, y2: height - 20 }),
    label(-codes / 2, `−${codes / 2}`, 'start'), label(0, '0', 'middle'), label(codes / 2 - 1, `${codes / 2 - 1}`, 'end'),
    s('text', { x: 4, y: 12 }, `tallest ${percent((100 * most) / whole)}`));
  return svg;
}

function noHistogram(layer) {
  if (!layer.weights) return 'A product of activations: it has no weights, so no histogram.';
  if (groups[layer.group].fixed) return 'Its precision is fixed, so no method counted its weights.';
  return 'No method of this page counted the weights, so there is no histogram; EAGL does.';
}

/** Its gain at the highest choice by every method, as a share of the method's greatest, with the interval where known. */
function gainsOf(group) {
  const slot = slots[group];
  if (slot === null) return [h('p', { class: 'note' }, 'No method decides about it.')];
  const line = 44;
  const width = 340;
  const svg = s('svg', { viewBox: `0 0 ${width} ${data.methods.length * line + 4}`, role: 'img', id: 'gains', 'aria-label': 'Gain by every method' });
  data.methods.forEach((method, index) => gainBar(svg, method, look(data.scores ? data.scores.titles.indexOf(method.title) : index), slot, index * line, width));
  const intervals = data.methods.some((method) => method.errors) ? ' Whiskers: ± 1.96 standard errors, where a method gives them.' : '';
  const linked = groups[group].layers.length > 1 ? ' of the whole group' : '';
  return [h('p', { class: 'note' }, `Gain${linked} at ${data.choices.at(-1).name} over ${data.choices[0].name}; a full bar is the method's greatest.${intervals}`), svg];
}

function gainBar(svg, method, { color }, slot, top, width) {
  const value = method.rows[slot].at(-1);
  const error = method.errors ? method.errors[slot].at(-1) : null;
  const greatest = Math.max(...method.rows.map((row) => Math.abs(row.at(-1)))) || 1;
  const long = (amount) => Math.max(0, Math.min(1, amount / greatest)) * (width - 4);
  const rank = `${method.ranks[slot]} of ${method.rows.length}`;
  const shown = error ? `${digits(value)} ± ${digits(1.96 * error, 2)}` : digits(value);
  svg.append(s('text', { x: 0, y: top + 14, class: 'strong' }, shortened(method.title, 22)),
    s('text', { x: width, y: top + 14, 'text-anchor': 'end' }, `${shown} · rank ${rank}`),
    s('rect', { x: 0, y: top + 20, width: width - 4, height: 12, rx: 3, fill: 'var(--line)', opacity: 0.6 }),
    s('rect', { x: 0, y: top + 20, width: long(value), height: 12, rx: 3, fill: color }));
  if (error) svg.append(s('path', { d: `M${long(value - 1.96 * error)} ${top + 26}H${long(value + 1.96 * error)}`, stroke: 'var(--ink)', 'stroke-width': 2 }));
}
