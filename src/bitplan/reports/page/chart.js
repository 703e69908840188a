// Axes, marks and how a chart is explored: by pointer, or by the arrow keys from one tab stop.

/** Round numbers between two bounds. */
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const base = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * base).find((size) => size >= raw * 0.999) || base;
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place += 1) found.push(Number((place * step).toPrecision(12)));
  return found;
}

/** Bounds with some air around them; a single value gets room too. */
function padded(values, share = 0.06) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const air = (high - low || Math.abs(high) || 1) * share;
  return [low - air, high + air];
}

/** An empty plot: the svg, its scales and its axes. */
function plot({ width, height, xs, ys, xLabel, yLabel, xTicks, label, margin = {} }) {
  const edge = { left: 58, right: 14, top: 14, bottom: 44, ...margin };
  const x = (value) => edge.left + ((value - xs[0]) / (xs[1] - xs[0] || 1)) * (width - edge.left - edge.right);
  const y = (value) => height - edge.bottom - ((value - ys[0]) / (ys[1] - ys[0] || 1)) * (height - edge.top - edge.bottom);
  const svg = s('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': label });
  for (const value of ticks(ys[0], ys[1], Math.round(height / 60))) {
    svg.append(s('line', { class: 'grid', x1: edge.left, x2: width - edge.right, y1: y(value), y2: y(value) }));
    svg.append(s('text', { x: edge.left - 8, y: y(value) + 4, 'text-anchor': 'end' }, digits(value)));
  }
  const room = Math.max(2, Math.floor((width - edge.left - edge.right) / 52));
  const wanted = xTicks || ticks(xs[0], xs[1], Math.min(8, room)).map((value) => [digits(value), value]);
  const every = Math.ceil(wanted.length / room);
  wanted.forEach(([text, value], index) => {
    if (index % every) return;
    svg.append(s('line', { class: 'axis', x1: x(value), x2: x(value), y1: height - edge.bottom, y2: height - edge.bottom + 4 }));
    svg.append(s('text', { x: x(value), y: height - edge.bottom + 18, 'text-anchor': 'middle' }, text));
  });
  svg.append(s('line', { class: 'axis', x1: edge.left, x2: width - edge.right, y1: height - edge.bottom, y2: height - edge.bottom }));
  svg.append(s('text', { x: (edge.left + width - edge.right) / 2, y: height - 6, 'text-anchor': 'middle' }, xLabel));
  svg.append(s('text', { x: -(height - edge.bottom + edge.top) / 2, y: 13, transform: 'rotate(-90)', 'text-anchor': 'middle' }, yLabel));
  return { svg, x, y, edge, width, height };
}

const SHAPES = [
  (r) => `M${-r} 0A${r} ${r} 0 1 0 ${r} 0A${r} ${r} 0 1 0 ${-r} 0Z`,
  (r) => `M${-r * 0.9} ${-r * 0.9}h${r * 1.8}v${r * 1.8}h${-r * 1.8}Z`,
  (r) => `M0 ${-r * 1.15}L${r * 1.1} ${r * 0.85}H${-r * 1.1}Z`,
  (r) => `M0 ${-r * 1.25}L${r * 1.25} 0L0 ${r * 1.25}L${-r * 1.25} 0Z`,
  (r) => `M0 ${r * 1.15}L${r * 1.1} ${-r * 0.85}H${-r * 1.1}Z`,
  (r) => `M${-r * 0.4} ${-r * 1.2}h${r * 0.8}v${r * 0.8}h${r * 0.8}v${r * 0.8}h${-r * 0.8}v${r * 0.8}h${-r * 0.8}v${-r * 0.8}h${-r * 0.8}v${-r * 0.8}h${r * 0.8}Z`,
  (r) => `M${-r * 1.2} 0L${-r * 0.6} ${-r}H${r * 0.6}L${r * 1.2} 0L${r * 0.6} ${r}H${-r * 0.6}Z`,
  (r) => `M0 ${-r * 1.3}L${r * 0.4} ${-r * 0.4}L${r * 1.3} 0L${r * 0.4} ${r * 0.4}L0 ${r * 1.3}L${-r * 0.4} ${r * 0.4}L${-r * 1.3} 0L${-r * 0.4} ${-r * 0.4}Z`,
];
const DASHES = ['', '7 3', '2 3', '9 3 2 3', '5 5', '12 4', '3 2', '1 4'];

/** Colour, dash and shape of a method, the same in every chart of the page; the ninth has the first colour and the second shape. */
const look = (index) => ({ color: `var(--m${index % 8})`, dash: DASHES[index % 8], shape: SHAPES[(index + Math.floor(index / 8)) % 8] });

/** A mark of a method at a place. */
function mark(index, x, y, radius = 4.5) {
  const { color, shape } = look(index);
  return s('path', { d: shape(radius), transform: `translate(${x} ${y})`, fill: color, stroke: 'var(--card)', 'stroke-width': 1 });
}

/**
 * Let a chart be explored. Points are {x, y, lines, series}; left and right move along a series, up and down between
 * series, Escape closes; the pointer takes the nearest.
 */
function explore(svg, points) {
  if (!points.length) return;
  const ring = s('circle', { r: 9, fill: 'none', stroke: 'var(--ink)', 'stroke-width': 2, visibility: 'hidden' });
  svg.append(ring);
  svg.setAttribute('tabindex', '0');
  let at = -1;
  const show = (index) => {
    at = index;
    const point = points[index];
    ring.setAttribute('cx', point.x);
    ring.setAttribute('cy', point.y);
    ring.setAttribute('visibility', 'visible');
    const box = svg.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    tipAt(box.left + point.x * scale, box.top + point.y * scale, point.lines);
  };
  const hide = () => { ring.setAttribute('visibility', 'hidden'); hideTip(); };
  const nearest = (x, y, among) => among.reduce((best, index) => {
    const far = (one) => (points[one].x - x) ** 2 + (points[one].y - y) ** 2;
    return best < 0 || far(index) < far(best) ? index : best;
  }, -1);
  const all = points.map((_, index) => index);
  svg.addEventListener('pointermove', (event) => {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    show(nearest((event.clientX - box.left) * scale, (event.clientY - box.top) * scale, all));
  });
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('blur', hide);
  svg.addEventListener('focus', () => { if (svg.matches(':focus-visible')) show(Math.max(0, at)); });
  svg.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') hide();
    const now = points[Math.max(0, at)];
    const own = all.filter((index) => points[index].series === now.series);
    const others = all.filter((index) => points[index].series !== now.series);
    const moves = {
      ArrowRight: () => own[Math.min(own.length - 1, own.indexOf(at) + 1)],
      ArrowLeft: () => own[Math.max(0, own.indexOf(at) - 1)],
      ArrowUp: () => nearest(now.x, now.y, others.filter((index) => points[index].y < now.y && Math.abs(points[index].x - now.x) < 12)),
      ArrowDown: () => nearest(now.x, now.y, others.filter((index) => points[index].y >= now.y && Math.abs(points[index].x - now.x) < 12)),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    const next = moves[event.key]();
    show(next === undefined || next < 0 ? Math.max(0, at) : next);
  });
}
