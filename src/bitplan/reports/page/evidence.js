// The lower half: additivity, what estimates cost, every trial, provenance.

function drawAdditivity() {
  const found = data.additivity;
  if (!found) return;
  const body = open('additivity', 'Additivity');
  body.append(h('p', { class: 'muted' }, 'Choosing by sums is right only if the effects of layers add up. On the line, they do.'));
  const charts = h('div', { class: 'pair' });
  if (found.pairs) charts.append(scatter('Two groups lowered together', `R = ${found.pairs.r.toFixed(3)}, ${plural(found.pairs.points.length, 'pair')}`, found.pairs.points, [`sum of single drops (${found.pairs.metric})`, 'measured drop'], 0));
  if (found.fit) {
    const axes = [`predicted ${found.fit.metric}`, `measured ${found.fit.metric}`];
    charts.append(scatter('Regression, fitted networks', `R = ${found.fit.r.toFixed(4)}, ${plural(found.fit.networks, 'network')}, residual ${digits(found.fit.residual, 2)}`, found.fit.fitted, axes, 2));
    if (found.fit.held_out.length) charts.append(scatter('Regression, held-out networks', found.fit.r_held_out === null ? 'too few for a correlation' : `R = ${found.fit.r_held_out.toFixed(4)}`, found.fit.held_out, axes, 1));
  }
  body.append(charts);
  if (!found.pairs) body.append(h('p', { class: 'note' }, 'The experiment on pairs was not run.'));
  if (!found.fit) body.append(h('p', { class: 'note' }, 'The regression was not run.'));
}

/** Predicted against measured, with the line where both are equal. */
function scatter(title, caption, points, [xLabel, yLabel], index) {
  const box = h('div', { class: 'chart' });
  const figure = h('div', {}, h('h3', {}, title), h('p', { class: 'note' }, caption), box);
  responsive(box, (width) => {
    const bounds = padded(points.flatMap(([predicted, measured]) => [predicted, measured]));
    const area = plot({ width, height: Math.min(340, Math.max(240, width * 0.85)), xs: bounds, ys: bounds, xLabel, yLabel, label: `${title}, ${caption}` });
    area.svg.append(s('line', { x1: area.x(bounds[0]), y1: area.y(bounds[0]), x2: area.x(bounds[1]), y2: area.y(bounds[1]), stroke: 'var(--soft)', 'stroke-dasharray': '6 4' }));
    const places = points.map(([predicted, measured, name]) => ({ x: area.x(predicted), y: area.y(measured), series: 0, lines: [name, `predicted ${digits(predicted)}`, `measured ${digits(measured)}`] }))
      .sort((one, other) => one.x - other.x);
    places.forEach((place) => { const point = mark(index, place.x, place.y, 4); point.setAttribute('fill-opacity', 0.75); area.svg.append(point); });
    box.replaceChildren(area.svg);
    explore(area.svg, places);
  });
  return figure;
}

function drawEstimates() {
  const body = open('estimates', 'Estimates');
  const rows = data.methods.map((method) => [
    method.title, Object.entries(method.options).map(([name, value]) => `${name}=${value}`).join(', ') || '–', method.selector, duration(method.seconds),
    Object.entries(method.counts).map(([name, count]) => `${count.toLocaleString('en')} ${name.replaceAll('_', ' ')}`).join(', ') || '–',
  ]);
  body.append(table(['method', 'options', 'selector', '>time', 'work'], rows, 'What the estimates cost'));
  body.append(h('p', { class: 'note' }, 'Time to estimate the gains of all groups once; training the chosen networks costs the same for every method.'));
  [['Score against spend', data.spend], ['Against the best plan found', data.regret]].forEach(([title, made]) => {
    if (!made) return;
    body.append(h('h3', {}, title), table(made.columns, made.rows, title));
    made.notes.forEach((note) => body.append(h('p', { class: 'note' }, `${note[0].toUpperCase()}${note.slice(1)}.`)));
  });
}

const PAGE = 15;
const TRIAL_COLUMNS = ['method', 'budget', '>seed', `>${data.scores ? data.scores.metric : 'score'}`, '>time', 'device', 'trial', 'plan', 'state'];
const trialView = { words: '', column: null, up: true, most: PAGE };

function drawTrials() {
  if (!data.trials) return;
  const body = open('trials', 'Trials');
  const failed = data.trials.filter((row) => row[8]).length;
  if (!data.trials.length) { body.append(say('No trial is done yet.')); return; }
  body.append(h('p', { class: 'muted' }, `${plural(data.trials.length - failed, 'trial')} done${failed ? `, ${failed} failed` : ', none failed'}.`));
  body.append(h('div', { class: 'row controls' }, h('label', {}, 'Filter', h('input', { type: 'search', id: 'trial-filter', placeholder: 'such as eagl 70% failed', input: (event) => { trialView.words = event.target.value; trialView.most = PAGE; fillTrials(); } })),
    h('span', { class: 'note', id: 'trial-count', role: 'status' })));
  const head = TRIAL_COLUMNS.map((column, index) => h('th', { scope: 'col', class: column.startsWith('>') ? 'n' : null }, h('button', { type: 'button', click: () => sortTrials(index) }, column.replace('>', ''))));
  body.append(h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'Trials' }, h('table', { class: 'fold sorted' }, h('thead', {}, h('tr', {}, head)), h('tbody', { id: 'trial-rows' }))));
  body.append(h('button', { type: 'button', id: 'more-trials', class: 'controls', click: () => { trialView.most = Infinity; fillTrials(); } }));
  fillTrials();
}

function sortTrials(index) {
  trialView.up = trialView.column === index ? !trialView.up : true;
  trialView.column = index;
  fillTrials();
}

/** Rows whose text holds every word of the filter, in the order asked for. */
function matchingTrials() {
  const words = trialView.words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = data.trials.filter((row) => { const text = [...row, row[8] ? 'failed' : 'done'].join(' ').toLowerCase(); return words.every((word) => text.includes(word)); });
  if (trialView.column === null) return found;
  const at = trialView.column;
  const order = (one, other) => (typeof one === 'string' ? one.localeCompare(other, 'en', { numeric: true }) : (one ?? -Infinity) - (other ?? -Infinity));
  return found.sort((one, other) => (trialView.up ? 1 : -1) * order(one[at], other[at]));
}

function fillTrials() {
  const found = matchingTrials();
  const rows = found.slice(0, trialView.most).map((row) => {
    const [method, budget, seed, score, seconds, device, trial, plan, error] = row;
    const cells = [[budget ? method : referenceName(method), 'wrap'], [budget || 'none', null], [seed, 'n'], [scored(score), 'n'], [duration(seconds), 'n'], [device || '–', null], [trial, 'id'], [plan || '–', 'id'], [error ? `failed: ${error}` : 'done', error ? 'wrap' : null]];
    return h('tr', { class: error ? 'failed' : null }, cells.map(([text, kind], index) => h('td', { class: kind, 'data-column': TRIAL_COLUMNS[index].replace('>', '') }, String(text))));
  });
  byId('trial-rows').replaceChildren(...rows);
  byId('trial-count').textContent = `${found.length.toLocaleString('en')} of ${data.trials.length.toLocaleString('en')}`;
  const more = byId('more-trials');
  more.hidden = rows.length === found.length;
  more.textContent = `Show all ${found.length.toLocaleString('en')}`;
}

function drawProvenance() {
  const body = open('provenance', 'Provenance');
  const rows = data.provenance.map(([name, value]) => h('tr', {}, h('th', { scope: 'row' }, name), h('td', {}, value)));
  body.append(h('table', { class: 'facts' }, h('tbody', {}, rows)));
}
