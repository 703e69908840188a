// The frontier: score against budget with spread, references and significance; or, without training, gain against budget.

function drawFrontier() {
  if (!data.scores) return drawGainFrontier();
  const body = open('frontier', 'Frontier');
  const { scores } = data;
  scores.notes.forEach((note) => body.append(say(note)));
  if (!scores.cells.length) {
    body.append(h('p', {}, 'There is no score to draw yet. Run the study on with bitplan sweep, then make this page again.'));
    return undefined;
  }
  const shown = new Set(scores.cells.map((cell) => cell.m));
  const state = { hidden: new Set(), reference: null, width: 0 };
  const box = h('div', { class: 'chart', id: 'frontier-chart' });
  const draw = () => { if (state.width) frontierChart(box, state); };
  const several = shown.size > 1;
  body.append(legend([...shown], state, draw));
  if (several) body.append(referencePicker([...shown], state, draw));
  body.append(box);
  if (several) body.append(h('p', { class: 'note', id: 'marks' }));
  responsive(box, (width) => { state.width = width; draw(); });
  body.append(h('details', {}, h('summary', {}, 'The same as a table'), scoreTable()));
  return undefined;
}

/** Buttons that switch methods off and on. */
function legend(methods, state, draw) {
  const buttons = methods.map((index) => h('button', {
    type: 'button', 'aria-pressed': 'true', 'data-method': index,
    click: (event) => {
      const button = event.currentTarget;
      const on = state.hidden.delete(index);
      if (!on) state.hidden.add(index);
      button.setAttribute('aria-pressed', String(on));
      draw();
    },
  }, sample(index), data.scores.titles[index]));
  return h('div', { class: 'legend', role: 'group', 'aria-label': 'Methods shown' }, buttons);
}

/** A short piece of a method's line with its mark. */
function sample(index) {
  const { color, dash } = look(index);
  return s('svg', { viewBox: '0 0 22 14', 'aria-hidden': 'true' },
    s('line', { x1: 0, x2: 22, y1: 7, y2: 7, stroke: color, 'stroke-width': 2, 'stroke-dasharray': dash }), mark(index, 11, 7, 4));
}

function referencePicker(methods, state, draw) {
  const { titles } = data.scores;
  state.reference = methods.find((index) => titles[index] === 'uniform') ?? methods.find((index) => titles[index] !== data.answer.method);
  const pick = h('select', { id: 'reference', change: (event) => { state.reference = Number(event.target.value); draw(); } },
    methods.map((index) => h('option', { value: index, selected: index === state.reference }, titles[index])));
  return h('div', { class: 'row controls' }, h('label', {}, 'Significance against', pick));
}

/** The test of a cell against a method: its difference (positive where the cell is better), p and verdict. */
function testAgainst(cell, reference) {
  const test = data.scores.tests.find(([first, second, budget]) => budget === cell.b
    && ((first === cell.m && second === reference) || (first === reference && second === cell.m)));
  if (!test) return null;
  const [first, , , difference, p, corrected, verdict] = test;
  return { difference: first === cell.m ? difference : -difference, p, corrected, verdict };
}

/** Stars for better, hollow triangles for worse, nothing where chance explains it. */
function starOf(test) {
  if (!test || test.p > data.alpha || test.verdict === 'the same plan' || test.verdict.startsWith('unequal')) return '';
  const sign = test.difference > 0 ? '★' : '▽';
  return test.corrected <= data.alpha ? sign + sign : sign;
}

function frontierChart(box, state) {
  const { scores } = data;
  const cells = scores.cells.filter((cell) => !state.hidden.has(cell.m));
  const means = (cells.length ? cells : scores.cells).flatMap((cell) => [cell.mean - (cell.sd || 0), cell.mean + (cell.sd || 0)]);
  const span = Math.max(...means) - Math.min(...means) || 1;
  const near = (row) => row.mean > Math.min(...means) - 1.5 * span && row.mean < Math.max(...means) + 1.5 * span;
  const lines = scores.references.filter(near);
  const far = scores.references.filter((row) => !near(row));
  const amounts = scores.budgets.map(([, amount]) => amount);
  const height = Math.max(300, Math.min(440, state.width * 0.5));
  const area = plot({
    width: state.width, height, xs: padded(amounts, 0.05), ys: padded([...means, ...lines.map((row) => row.mean)], 0.08),
    xLabel: scores.unit, yLabel: `${scores.metric}${scores.up ? '' : ' (lower is better)'}`,
    xTicks: scores.budgets.map(([text, amount]) => [text.replace(/^.*=/, ''), amount]),
    label: `${scores.metric} against budget for every method; arrow keys move between points`,
  });
  lines.forEach((row) => referenceLine(area, row));
  const points = [];
  const shown = [...new Set(cells.map((cell) => cell.m))];
  const step = apart(area, amounts, shown.length);
  shown.forEach((index, place) => {
    const aside = (place - (shown.length - 1) / 2) * step;
    drawSeries(area, index, cells.filter((cell) => cell.m === index), { aside, reference: state.reference }, points);
  });
  referenceNames(area, lines, points);
  box.replaceChildren(area.svg);
  explore(area.svg, points);
  explainMarks(state, far);
}

function referenceLine(area, row) {
  const y = area.y(row.mean);
  const dash = row.title === 'float' ? '8 3' : '2 4';
  area.svg.append(s('line', { x1: area.edge.left, x2: area.width - area.edge.right, y1: y, y2: y, stroke: 'var(--ink)', 'stroke-width': 1.2, 'stroke-dasharray': dash }));
}

/** The names of the lines, each where it covers least of curves and other names. */
function referenceNames(area, lines, points) {
  const taken = [...curveBoxes(points), ...lines.map((row) => ({ left: 0, right: area.width, top: area.y(row.mean) - 1, bottom: area.y(row.mean) + 1 }))];
  lines.forEach((row) => {
    const name = `${referenceName(row.title)} ${scored(row.mean)}`;
    const [wide, y] = [7.2 * name.length, area.y(row.mean)];
    const [first, last] = [area.edge.left + 4, area.width - area.edge.right - 4 - wide];
    const boxes = [0, 1, 0.5, 0.25, 0.75].flatMap((share) => [y - 16, y + 3].map((top) => ({ left: first + share * (last - first), right: first + share * (last - first) + wide, top, bottom: top + 14 })));
    const covers = (box) => taken.filter((other) => other.left < box.right && other.right > box.left && other.top < box.bottom && other.bottom > box.top).length;
    const inside = boxes.filter((box) => box.top >= 0 && box.bottom <= area.height - area.edge.bottom);
    const place = inside.reduce((best, box) => (covers(box) < covers(best) ? box : best));
    taken.push(place);
    area.svg.append(s('text', { x: place.left, y: place.bottom - 3, class: 'strong over' }, name));
  });
}

/** Where curves are: around their points with spread and stars, and in small steps between them. */
function curveBoxes(points) {
  const around = (x, top, bottom, far) => ({ left: x - far, right: x + far, top, bottom });
  return points.flatMap((point, index) => {
    const next = points[index + 1];
    const steps = next && next.series === point.series ? Math.ceil((next.x - point.x) / 4) : 0;
    const between = Array.from({ length: steps }, (_, step) => point.y + (step / steps) * (next.y - point.y));
    return [around(point.x, point.top, point.bottom, 14), ...between.map((y, step) => around(point.x + 4 * step, y - 2, y + 2, 2))];
  });
}

const DENSE = 24; // budgets from which whiskers would hide each other

/** By how many pixels methods stand beside each other, so that their spreads do not hide each other. */
function apart(area, amounts, count) {
  const places = amounts.map((amount) => area.x(amount)).sort((one, other) => one - other);
  const gaps = places.slice(1).map((place, before) => place - places[before]);
  return gaps.length ? Math.min(9, Math.min(...gaps) / (2 * count)) : Math.min(40, (0.7 * area.width) / count);
}

/** One method: line, spread of one standard deviation, marks, and stars; `aside` of the budget by so many pixels. */
function drawSeries(area, index, cells, { aside, reference }, points) {
  const { color, dash } = look(index);
  const ordered = [...cells].sort((one, other) => one.b - other.b);
  const dense = ordered.length > DENSE;
  const x = (cell) => area.x(data.scores.budgets[cell.b][1]) + aside;
  const line = (list, height) => list.map((cell, step) => `${step ? 'L' : 'M'}${x(cell)} ${area.y(height(cell))}`).join('');
  if (dense) area.svg.append(s('path', { d: `${line(ordered, (cell) => cell.mean + (cell.sd || 0))}${line([...ordered].reverse(), (cell) => cell.mean - (cell.sd || 0)).replace('M', 'L')}Z`, fill: color, opacity: 0.1 }));
  area.svg.append(s('path', { d: line(ordered, (cell) => cell.mean), fill: 'none', stroke: color, 'stroke-width': 2, 'stroke-dasharray': dash }));
  for (const cell of ordered) {
    const test = reference === null || reference === index ? null : testAgainst(cell, reference);
    if (!dense) whisker(area, x(cell), cell, color);
    area.svg.append(mark(index, x(cell), area.y(cell.mean), dense ? 2.5 : 4.5));
    star(area, x(cell), cell, test, color);
    const reach = (sign) => area.y(cell.mean + sign * (cell.sd || 0)) - sign * 6;
    const marked = starOf(test) && test.difference;
    points.push({
      x: x(cell), y: area.y(cell.mean), top: reach(1) - (marked > 0 ? 12 : 0), bottom: reach(-1) + (marked < 0 ? 12 : 0),
      series: index, lines: cellLines(cell, test, reference),
    });
  }
}

function whisker(area, x, cell, color) {
  if (!cell.sd) return;
  const [low, high] = [area.y(cell.mean - cell.sd), area.y(cell.mean + cell.sd)];
  area.svg.append(s('path', { d: `M${x} ${low}V${high}M${x - 3} ${low}h6M${x - 3} ${high}h6`, stroke: color, 'stroke-width': 1.5 }));
}

/** Better is marked above, worse below. */
function star(area, x, cell, test, color) {
  const sign = starOf(test);
  if (!sign) return;
  const y = test.difference > 0 ? area.y(cell.mean + (cell.sd || 0)) - 5 : area.y(cell.mean - (cell.sd || 0)) + 14;
  const text = s('text', { x, y, 'text-anchor': 'middle', class: 'star' }, sign);
  text.style.fill = color;
  area.svg.append(text);
}

function cellLines(cell, test, reference) {
  const { scores } = data;
  const lines = [`${scores.titles[cell.m]} at ${scores.budgets[cell.b][0]}`, `${spread(cell)}${cell.sd === null ? '' : `, ${plural(cell.scores.length, 'seed')}`}`];
  if (test) lines.push(`${signed(test.difference, scored(Math.abs(test.difference)))} against ${scores.titles[reference]}${test.verdict.startsWith('unequal') ? '' : `, p = ${digits(test.p, 2)}`}: ${test.verdict}`);
  if (cell.same.length) lines.push(`same plan as ${cell.same.join(', ')}`);
  return lines;
}

function explainMarks(state, far) {
  const note = byId('marks');
  const outside = far.map((row) => `${referenceName(row.title)} (${spread(row)}) lies outside the chart.`).join(' ');
  if (!note) { if (outside) byId('frontier-chart').append(h('p', { class: 'note' }, outside)); return; }
  const title = data.scores.titles[state.reference];
  note.textContent = `Mean ± one standard deviation over seeds, methods side by side at each budget. ★ significantly better than ${title}, ▽ worse (${data.scores.test}, p ≤ ${data.alpha}); twice: also after ${data.correction} over the budgets. ${outside}`;
}

/** Every mean as a table: methods by budgets, references below. */
function scoreTable() {
  const { scores } = data;
  const budgets = scores.budgets.map(([text]) => `>${text}`);
  const label = `${scores.metric} by method and budget`;
  const rows = scores.titles.map((title, index) => [title, ...scores.budgets.map((_, place) => {
    const cell = scores.cells.find((one) => one.m === index && one.b === place);
    return cell ? spread(cell) : 'not run';
  })]);
  if (!scores.references.length) return table(['method', ...budgets], rows, label);
  const references = scores.references.map((row) => [referenceName(row.title), ...budgets.map(() => ''), spread(row)]);
  return table(['method', ...budgets, '>no budget'], [...rows.map((row) => [...row, '']), ...references], label);
}

/** Without training: the exact frontier of the estimate itself. */
function drawGainFrontier() {
  const ride = data.rides[0];
  byId('frontier-title').textContent = 'Gain against budget';
  const body = open('frontier', 'Frontier');
  const box = h('div', { class: 'chart', id: 'frontier-chart' });
  const stops = data.track.stops.map(([label, place], index) => ({ label, place, plan: ride.at[index] })).filter((stop) => stop.plan !== null);
  body.append(h('p', { class: 'note' }, `The greatest total gain by ${data.methods[0].title} that each budget allows. No network was trained, so there are no scores.`), box);
  responsive(box, (width) => {
    const area = plot({
      width, height: Math.max(240, Math.min(340, width * 0.4)), xs: padded(stops.map((stop) => stop.place), 0.03), ys: padded(stops.map((stop) => ride.gain[stop.plan])),
      xLabel: data.track.axis, yLabel: 'gain', label: 'Gain against budget; arrow keys move between points',
    });
    const points = stops.map((stop) => ({ x: area.x(stop.place), y: area.y(ride.gain[stop.plan]), series: 0, lines: [`budget ${stop.label}`, `gain ${digits(ride.gain[stop.plan])}, ${ride.used[stop.plan]} used`] }));
    area.svg.append(s('path', { d: points.map((point, index) => (index ? `H${point.x}V${point.y}` : `M${point.x} ${point.y}`)).join(''), fill: 'none', stroke: 'var(--m0)', 'stroke-width': 2 }));
    const here = points[stops.findIndex((stop) => stop.label === data.answer.budget)];
    if (here) area.svg.append(mark(0, here.x, here.y, 6), s('text', { x: here.x - 8, y: here.y - 8, 'text-anchor': 'end', class: 'strong over' }, data.answer.budget));
    box.replaceChildren(area.svg);
    explore(area.svg, points);
  });
  return undefined;
}
