// The slider over the frontier: layer bars, cost, gain and shadow price of one or two methods, live.

const NONE = -1;
const MANY = 300; // layers from which drawing has to be thrifty
const groups = data.network.groups;
const layers = groups.flatMap((group, index) => group.layers.map((layer) => ({ name: layer[0], kind: layer[1], macs: layer[2], weights: layer[3], inputs: layer[4], place: layer[5], group: index })))
  .sort((one, other) => one.place - other.place);
const slots = slotsOf();
const mostBits = Math.max(...data.choices.map((choice) => choice.w), ...groups.map((group) => (group.fixed ? group.fixed.w : 0)));
const view = { stop: data.track.start, a: 0, b: NONE, selected: null, drawn: { a: null, b: null } };

/** Group → its digit in a plan; fixed groups have none. */
function slotsOf() {
  let next = 0;
  return groups.map((group) => (group.fixed ? null : next++));
}

/** The picks of a method at a stop, or null where no plan meets the other budgets. */
function picksAt(method, stop) {
  const plan = data.rides[method].at[stop];
  return plan === null ? null : data.rides[method].picks[plan];
}

/** The precision of a group under picks: its name, weight bits, and the tone that it is painted in. */
function precisionOf(group, picks) {
  const { fixed } = groups[group];
  if (fixed) return { name: fixed.name, w: fixed.w, tone: 'fixed' };
  if (picks === null) return { name: '–', w: 0, tone: 'fixed' };
  const index = parseInt(picks[slots[group]], 36);
  return { name: data.choices[index].name, w: data.choices[index].w, tone: toneOf(index) };
}

/** Low precisions are warm, high ones cool and dark. */
function toneOf(index) {
  const last = data.choices.length - 1;
  if (last <= 1) return index ? 2 : 0;
  return index === 0 ? 0 : Math.min(3, 1 + Math.floor((3 * (index - 1)) / Math.max(1, last)));
}

function drawLayers() {
  const body = open('layers', 'Layers');
  const named = data.methods.findIndex((method) => method.title === data.answer.method);
  view.a = Math.max(0, named);
  view.b = data.methods.length > 1 ? data.methods.findIndex((_, index) => index !== view.a) : NONE;
  const facts = `${plural(layers.length, 'layer')} in ${plural(groups.length, 'group')}, ${slots.filter((slot) => slot !== null).length} to choose; ${prefixed(data.network.macs)} MACs, ${prefixed(data.network.weights)} weights.`;
  body.append(h('p', { class: 'muted' }, `${facts}${data.network.groups.some((group) => group.through) ? ' Linked layers read the same tensor and share one precision.' : ''}`));
  body.append(...[slider(), chips(), pickers()].filter(Boolean), stripFrame(), key(), h('div', { class: 'scroll', id: 'readouts' }));
  body.append(h('div', { class: 'row controls' }, h('label', {}, 'Find', h('input', { type: 'search', id: 'find', placeholder: 'name of a layer', input: filterList })),
    h('label', { hidden: data.methods.length < 2 }, h('input', { type: 'checkbox', id: 'differing', change: filterList }), 'only layers that differ'),
    h('span', { class: 'note', id: 'found', role: 'status' })));
  const detail = h('aside', { class: 'detail empty', id: 'detail', 'aria-live': 'polite' }, 'Choose a layer to see its weights and what every method says about it.');
  body.append(h('div', { class: 'explorer' }, list(), detail));
  if (data.network.unreached.length) body.append(h('p', { class: 'note' }, `Not reached by the example input, so not planned: ${data.network.unreached.join(', ')}`));
  responsive(byId('strip'), drawStrip);
  refresh();
}

function slider() {
  const input = h('input', {
    type: 'range', id: 'budget', min: 0, max: data.track.stops.length - 1, step: 1, 'aria-label': 'Budget',
    input: () => { view.stop = Number(input.value); soon(); },
  });
  input.value = view.stop;
  const points = data.track.complete ? 'every point of the exact frontier' : `${data.track.stops.length} points of the exact frontier`;
  const held = data.track.others.length ? `; ${data.track.others.join(' and ')} holds as well` : '';
  return h('div', {}, h('div', { class: 'slider' }, input, h('output', { id: 'budget-shown', for: 'budget' })),
    h('p', { class: 'note' }, `Budget of ${data.cost.name}${data.track.fixed === null ? '' : `, whole network${wholeNetwork()}`}, over ${points}${held}.`));
}

/** Shortcuts to the budgets of the study. */
function chips() {
  const buttons = data.track.budgets.map((stop) => h('button', { type: 'button', 'data-stop': stop, click: () => goTo(stop) }, data.track.stops[stop][0]));
  return buttons.length > 1 && buttons.length <= 24 ? h('div', { class: 'chips', role: 'group', 'aria-label': 'Budgets of the study' }, buttons) : null;
}

function goTo(stop) {
  view.stop = stop;
  byId('budget').value = stop;
  soon();
}

function pickers() {
  if (data.methods.length < 2) return data.scores ? h('p', { class: 'note' }, 'There is one method in this run, so nothing to put beside it.') : null;
  const pick = (side, none) => h('select', { id: `method-${side}`, change: (event) => { view[side] = Number(event.target.value); refresh(); } },
    none ? h('option', { value: NONE }, 'nothing') : null,
    data.methods.map((method, index) => h('option', { value: index, selected: index === view[side] }, method.title)));
  return h('div', { class: 'row controls' }, h('label', {}, h('span', { class: 'letter' }, 'A'), pick('a', false)), h('label', {}, h('span', { class: 'letter' }, 'B'), pick('b', true)));
}

const soon = perFrame(refresh);

/** Bring everything up to date with the stop and the methods; only bars that change are touched. */
function refresh() {
  const [label] = data.track.stops[view.stop];
  byId('budget-shown').textContent = label;
  byId('budget').setAttribute('aria-valuetext', label);
  document.querySelectorAll('.chips button').forEach((chip) => chip.setAttribute('aria-current', String(Number(chip.dataset.stop) === view.stop)));
  const sides = view.b === NONE ? ['a'] : ['a', 'b'];
  byId('readouts').replaceChildren(readouts(sides));
  byId('layer-list').classList.toggle('two', view.b !== NONE);
  const next = { a: picksAt(view.a, view.stop), b: view.b === NONE ? null : picksAt(view.b, view.stop) };
  groups.forEach((group, index) => { if (changed(index, next)) paintGroup(index, next); });
  view.drawn = { ...next, two: view.b !== NONE };
  paintStripState();
  if (byId('differing').checked) filterList();
  if (view.selected) drawDetail();
}

function changed(group, next) {
  const { drawn } = view;
  const slot = slots[group];
  if (drawn.a === null || drawn.two !== (view.b !== NONE) || (drawn.b === null) !== (next.b === null) || next.a === null) return true;
  return slot !== null && (drawn.a[slot] !== next.a[slot] || (next.b !== null && drawn.b[slot] !== next.b[slot]));
}

/** What the plans at this stop come to: a line per method on a wide screen, a column per method on a narrow one. */
function readouts(sides) {
  const found = sides.map((side) => figuresOf(side));
  const cell = (id, index) => h('td', { class: 'n', 'data-figure': `${id}-${sides[index]}` }, found[index] ? found[index][id] : 'no plan');
  const name = (side, scope) => h('th', { scope, class: scope === 'col' ? 'n' : null }, data.methods.length > 1 ? h('span', { class: 'letter' }, side.toUpperCase()) : null, ` ${data.methods[view[side]].title}`);
  if (narrow.matches) {
    const rows = FIGURES.map(([what, id]) => h('tr', {}, h('th', { scope: 'row' }, what), sides.map((_, index) => cell(id, index))));
    return h('table', { class: 'readout' }, h('thead', {}, h('tr', {}, h('td', {}), sides.map((side) => name(side, 'col')))), h('tbody', {}, rows));
  }
  const head = FIGURES.map(([what]) => h('th', { scope: 'col', class: 'n' }, what));
  const rows = sides.map((side, index) => h('tr', {}, name(side, 'row'), FIGURES.map(([, id]) => cell(id, index))));
  return h('table', { class: 'readout wide' }, h('thead', {}, h('tr', {}, h('td', {}), head)), h('tbody', {}, rows));
}

const narrow = matchMedia('(max-width: 760px)');
narrow.addEventListener('change', () => refresh());

const FIGURES = [
  [`${data.cost.name} used`, 'used'], [`${data.cost.unit || 'cost'}, chosen layers`, 'cost'], ['gain', 'gain'], ['1% more would gain', 'price'],
  ['weights', 'size'], ['smaller than 32-bit', 'smaller'], ['bit operations', 'bops'], [`groups at ${data.choices.map((choice) => choice.name).join(' / ')}`, 'counts'],
];

function figuresOf(side) {
  const ride = data.rides[view[side]];
  const plan = ride.at[view.stop];
  if (plan === null) return null;
  const counts = data.choices.map((_, index) => [...ride.picks[plan]].filter((pick) => parseInt(pick, 36) === index).length);
  return {
    used: ride.used[plan],
    cost: ride.cost[plan].toLocaleString('en'),
    gain: digits(ride.gain[plan], 6),
    price: digits(ride.price[view.stop], 4),
    size: bytes(ride.bits[plan]),
    smaller: `${digits(ride.smaller[plan], 4)}×`,
    bops: prefixed(ride.bops[plan]),
    counts: counts.join(' / '),
  };
}

function key() {
  const tones = data.choices.map((choice, index) => h('li', {}, h('i', { 'data-tone': toneOf(index) }), choice.name));
  return h('ul', { class: 'key' }, tones, groups.some((group) => group.fixed) ? h('li', {}, h('i', { 'data-tone': 'fixed' }), 'fixed by a rule') : null,
    data.network.groups.some((group) => group.through) ? h('li', {}, '⊓ linked layers') : null, data.methods.length > 1 ? h('li', {}, '◆ A and B differ') : null);
}

/** One row per layer, linked ones joined; one tab stop, arrows move, Enter chooses. */
function list() {
  const items = groups.map((group, index) => {
    const rows = group.layers.map((layer) => layerRow(layer, group, index));
    const through = group.through ? h('p', { class: 'through' }, `linked through ${group.through}`) : null;
    return h('li', { class: group.layers.length > 1 ? 'linked' : null }, through, rows);
  });
  const element = h('ul', { class: layers.length > MANY ? 'list many' : 'list', id: 'layer-list', 'aria-label': 'Layers in order of execution', keydown: moveInList }, items);
  const first = element.querySelector('.layer');
  if (first) first.tabIndex = 0;
  return element;
}

function layerRow(layer, group, index) {
  const bits = (side) => h('span', { class: `bits ${side}` }, h('b', {}), h('i', {}));
  const small = group.fixed ? `${layer[1]} · fixed: ${group.fixed.why}` : `${layer[1]} · ${prefixed(layer[3])} weights`;
  return h('button', { type: 'button', class: 'layer', tabindex: '-1', 'aria-pressed': 'false', 'data-group': index, 'data-layer': layer[5], click: (event) => choose(layer[5], event.currentTarget) },
    h('span', { class: 'name' }, layer[0], h('small', {}, small)), bits('a'), bits('b'), h('span', { class: 'differs', title: 'A and B differ' }, '◆'));
}

function moveInList(event) {
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
  if (!(event.key in steps)) return;
  event.preventDefault();
  const rows = [...byId('layer-list').querySelectorAll('li:not([hidden]) .layer')];
  const at = rows.indexOf(document.activeElement);
  focusRow(rows[Math.min(rows.length - 1, Math.max(0, at + steps[event.key]))]);
}

function focusRow(row) {
  if (!row) return;
  document.querySelectorAll('.layer[tabindex="0"]').forEach((other) => { other.tabIndex = -1; });
  row.tabIndex = 0;
  row.focus();
}

let rowsOfGroup = null;
/** The rows of a group, found once. */
function rowsOf(group) {
  if (!rowsOfGroup) {
    rowsOfGroup = groups.map(() => []);
    document.querySelectorAll('.layer').forEach((row) => rowsOfGroup[Number(row.dataset.group)].push({ row, a: row.querySelector('.a'), b: row.querySelector('.b') }));
  }
  return rowsOfGroup[group];
}

function paintGroup(group, next) {
  const sides = { a: precisionOf(group, next.a), b: view.b === NONE ? null : precisionOf(group, next.b) };
  const unlike = sides.b !== null && sides.a.name !== sides.b.name;
  for (const { row, a, b } of rowsOf(group)) {
    paintBits(a, sides.a);
    if (sides.b) paintBits(b, sides.b);
    row.classList.toggle('unlike', unlike);
    row.setAttribute('aria-label', `${row.querySelector('.name').firstChild.textContent}: ${sides.a.name}${sides.b ? ` against ${sides.b.name}` : ''}`);
  }
  paintStrip(group, sides, unlike);
}

function paintBits(cell, precision) {
  cell.firstChild.textContent = precision.name;
  cell.lastChild.dataset.tone = precision.tone;
  cell.lastChild.style.setProperty('--share', precision.w / mostBits);
}

/** Show only the rows that match the search, or that differ. */
function filterList() {
  const wanted = byId('find').value.trim().toLowerCase();
  const differing = byId('differing').checked && view.b !== NONE;
  let count = 0;
  groups.forEach((group, index) => {
    const rows = rowsOf(index);
    const match = group.layers.some((layer) => layer[0].toLowerCase().includes(wanted)) && (!differing || rows[0].row.classList.contains('unlike'));
    rows[0].row.closest('li').hidden = !match;
    if (match) count += group.layers.length;
  });
  byId('found').textContent = wanted || differing ? `${plural(count, 'layer')} of ${layers.length}` : '';
}
