// The answer first: one sentence, how sure it is, the figures, the command.

function drawAnswer() {
  const answer = data.answer;
  const body = open('answer', 'Answer');
  const under = [answer.under, ...answer.others].join(' and ');
  const best = answer.rows[0];
  const verdict = h('p', { class: 'verdict' }, 'At a budget of ', h('b', {}, under), ', take the plan of ', h('b', {}, answer.method));
  if (best) verdict.append(`: ${data.scores.metric} `, h('b', {}, spread(best)), `${versus(best)}.`);
  else verdict.append('.');
  body.append(verdict, h('p', {}, answer.sentences.join(' ')));
  if (answer.rows.length > 1) body.append(ladder(bestFirst(answer.rows), best));
  body.append(tiles(answer), h('p', { class: 'note' }, `The selection is ${answer.proof}. This makes the plan again:`), command(answer.command));
}

const bestFirst = (rows) => [...rows].sort((one, other) => (data.scores.up ? other.mean - one.mean : one.mean - other.mean));

/** How far the best is from the float network and those at one precision, in words. */
function versus(best) {
  const parts = bestFirst(data.answer.rows.slice(1)).map((row) => {
    const difference = best.mean - row.mean;
    return `${signed(difference, scored(Math.abs(difference)))} against ${referenceName(row.title)}`;
  });
  return parts.length ? `, ${parts.join(', ')}` : '';
}

/** The chosen plan between its references on one axis, each with its spread. */
function ladder(rows, best) {
  const box = h('div', { class: 'ladder' });
  responsive(box, (width) => {
    const line = 30;
    const height = rows.length * line + 34;
    const named = Math.min(150, width * 0.3);
    const ends = rows.flatMap((row) => [row.mean - (row.sd || 0), row.mean + (row.sd || 0)]);
    const [low, high] = padded(ends, 0.08);
    const x = (value) => named + ((value - low) / (high - low)) * (width - named - 96);
    const svg = s('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': rows.map((row) => `${row.title} ${spread(row)}`).join('; ') });
    rows.forEach((row, index) => {
      const y = index * line + 16;
      const color = row === best ? 'var(--accent)' : 'var(--soft)';
      const strong = row === best ? 'strong' : null;
      svg.append(s('line', { class: 'grid', x1: named, x2: width - 90, y1: y, y2: y }));
      if (row.sd) svg.append(s('line', { x1: x(row.mean - row.sd), x2: x(row.mean + row.sd), y1: y, y2: y, stroke: color, 'stroke-width': 7, 'stroke-linecap': 'round', opacity: 0.35 }));
      svg.append(s('circle', { cx: x(row.mean), cy: y, r: 6, fill: color }));
      svg.append(s('text', { x: 0, y: y + 4, class: strong }, shortened(row === best ? row.title : referenceName(row.title), named / 7)));
      svg.append(s('text', { x: width, y: y + 4, 'text-anchor': 'end', class: strong }, row.sd === null ? scored(row.mean) : `${scored(row.mean)} ± ${scored(row.sd)}`));
    });
    for (const value of ticks(low, high, Math.max(2, Math.floor(width / 160)))) {
      svg.append(s('text', { x: x(value), y: height - 6, 'text-anchor': 'middle' }, digits(value)));
    }
    box.replaceChildren(svg);
  });
  return box;
}

/** A network that no method planned: the float one, or one with the same precision everywhere. */
const referenceName = (title) => (title === 'float' ? 'float' : `all at ${title}`);

const shortened = (text, most) => (text.length > most ? `${text.slice(0, Math.max(3, Math.floor(most) - 1))}…` : text);

function tiles(answer) {
  const figures = [
    [answer.used, `of ${data.cost.name} used, of ${answer.budget} allowed${wholeNetwork()}`],
    [bytes(answer.bits), `of weights, ${digits(answer.smaller, 3)}× smaller than 32-bit`],
    answer.bmacs === null ? null : [prefixed(answer.bmacs), 'bit-MACs (BMACs), fixed layers too'],
    [prefixed(answer.bops), 'bit operations (BOPs)'],
    [answer.counts.map(([, count]) => count).join(' / '), `groups at ${answer.counts.map(([name]) => name).join(' / ')}; ${answer.fixed} fixed`],
  ];
  return h('ul', { class: 'tiles' }, figures.filter(Boolean).map(([value, what]) => h('li', {}, h('b', {}, value), h('span', {}, what))));
}

/** What fixed layers have of a budget for the whole network; a share is of choosable layers only. */
const wholeNetwork = () => (data.track.fixed === null ? '' : `, ${data.track.fixed} of it by fixed layers`);

/** A command with a button that copies it. */
function command(text) {
  const code = h('code', { tabindex: '0' }, text);
  const copy = h('button', { type: 'button', click: async () => {
    getSelection().selectAllChildren(code);
    try { await navigator.clipboard.writeText(text); copy.textContent = 'Copied'; } catch { copy.textContent = 'Selected'; }
    setTimeout(() => { copy.textContent = 'Copy'; }, 1500);
  } }, 'Copy');
  return h('div', { class: 'command' }, code, copy);
}
