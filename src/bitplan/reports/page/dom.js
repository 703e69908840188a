// Elements, numbers as people write them, and the tooltip. Names from the data only ever become text.

const data = JSON.parse(document.getElementById('data').textContent);
const SVG = 'http://www.w3.org/2000/svg';
const byId = (id) => document.getElementById(id);

/** Make an HTML element; attributes that are functions become listeners, `class` and aria pass through. */
function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Make an SVG element. */
function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A number with so many significant digits and no exponent where it can be avoided. */
function digits(value, count = 4) {
  if (value === null || value === undefined) return '–';
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return Number(value.toPrecision(count)).toExponential().replace('e+', 'e');
  return Number(value.toPrecision(count)).toLocaleString('en', { maximumSignificantDigits: count });
}

/** A large number with its prefix: 1.23 G. */
function prefixed(value, unit = '') {
  if (value === null || value === undefined) return '–';
  const steps = [[1e15, 'P'], [1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k'], [1, '']];
  const [size, prefix] = steps.find(([limit]) => value >= limit) || [1, ''];
  return `${Number((value / size).toPrecision(4))} ${prefix}${unit}`.trim();
}

/** Bits as bytes. */
const bytes = (bits) => prefixed(bits / 8, 'B');
const percent = (share) => `${Number(share.toFixed(2))}%`;
const decimals = scoreDecimals();
const scored = (value) => (value === null ? '–' : value.toFixed(decimals));
const signed = (value, shown) => (value < 0 ? '−' : '+') + shown.replace(/^[-−]/, '');
const plural = (count, word) => `${count.toLocaleString('en')} ${word}${count === 1 ? '' : 's'}`;

/** Scores in percent get two decimals, scores around 1 get four. */
function scoreDecimals() {
  const means = data.scores ? data.scores.cells.map((cell) => Math.abs(cell.mean)) : [];
  return Math.max(0, ...means) > 2 ? 2 : 4;
}

/** A time for people. */
function duration(seconds) {
  if (seconds < 0.001) return '< 1 ms';
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${digits(seconds, 3)} s`;
  return seconds < 7200 ? `${digits(seconds / 60, 3)} min` : `${digits(seconds / 3600, 3)} h`;
}

/** Mean and spread; a single seed has none, and says so. */
const spread = (row) => (row.sd === null ? `${scored(row.mean)} (one seed)` : `${scored(row.mean)} ± ${scored(row.sd)}`);

/** Show a section, put it into the navigation, and give its body. */
function open(id, name) {
  const section = byId(id);
  section.hidden = false;
  byId('contents').append(h('a', { href: `#${id}` }, name));
  return byId(`${id}-body`);
}

/** A table; columns that start with ">" are numbers. On a phone every row is a paragraph, with the names of columns in it. */
function table(columns, rows, label) {
  const kinds = columns.map((column) => (column.startsWith('>') ? 'n' : null));
  const names = columns.map((column) => column.replace('>', ''));
  const head = names.map((name, index) => h('th', { scope: 'col', class: kinds[index] }, name));
  const body = rows.map((row) => h('tr', {}, row.map((cell, index) => h('td', { class: kinds[index], 'data-column': names[index] }, cell))));
  return h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': label },
    h('table', { class: 'fold' }, h('thead', {}, h('tr', {}, head)), h('tbody', {}, body)));
}

const say = (text) => h('p', { class: 'say' }, text);

/** Show lines beside a place of the window. */
function tipAt(x, y, lines) {
  const tip = byId('tip');
  tip.replaceChildren(...lines.map((line) => h('div', {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, x + 14), innerWidth - box.width - 8);
  const top = y - box.height - 12 < 4 ? y + 18 : y - box.height - 12;
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

const hideTip = () => { byId('tip').hidden = true; };

/** Draw now, and again whenever the container has another width. */
function responsive(container, draw) {
  let known = 0;
  const again = () => {
    const width = Math.floor(container.clientWidth);
    if (width > 0 && width !== known) draw((known = width));
  };
  new ResizeObserver(again).observe(container);
  again();
}

/** Run once per frame, however often it is called. */
function perFrame(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; work(); });
  };
}
