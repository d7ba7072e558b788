// Held-out problems at two stages, side by side.

const CHANGES = {
  all: () => true, right: (a, b) => a === 'r' && b === 'r',
  fixed: (a, b) => !'r-'.includes(a) && b === 'r', broken: (a, b) => a === 'r' && !'r-'.includes(b), wrong: (a, b) => !'r-'.includes(a) && !'r-'.includes(b),
};
const VERDICT_FLAGS = { r: 1, l: 6, w: 2, '-': 0 };

// `held-out/RUN/MODE/PROBLEM` of an address: the problem is shown, at the stages that are shown first.
let openHeldOut = () => {};

function beforeAfterSection() {
  const offered = state.data.runs.flatMap((run, r) => run.held_out.map((mode, m) => [r + '/' + m, run.name + ', ' + mode.mode]));
  if (!offered.length) return null;
  const chosen = { at: offered[0][0], before: 0, after: 0, change: 'all' };
  const controls = el('div', { class: 'controls' }), list = el('div', {});
  let page = null, turn = 0;  // null: the first problem of which something became
  const table_ = () => { const [r, m] = chosen.at.split('/').map(Number); return [r, state.data.runs[r].held_out[m]]; };
  const reset = () => { const [, held] = table_(); chosen.before = Math.max(0, held.stages.indexOf('warm_start')); chosen.after = held.stages.length - 1; };
  const set = (key, value) => { chosen[key] = value; page = null; if (key === 'at') reset(); draw(); };
  const draw = async (go) => {
    const mine = ++turn, [r, held] = table_();
    const stages = held.stages.map((stage, i) => [i, stageName(stage)]);
    replaceChildren(controls, offered.length > 1 ? select('Run and mode', offered, chosen.at, (v) => set('at', v)) : null,
      select('Before', stages, chosen.before, (v) => set('before', Number(v))), select('After', stages, chosen.after, (v) => set('after', Number(v))),
      select('Show', [['all', 'all'], ['fixed', 'fixed'], ['broken', 'broken'], ['right', 'right both times'], ['wrong', 'wrong both times']], chosen.change, (v) => set('change', v)));
    const a = held.verdicts[chosen.before], b = held.verdicts[chosen.after];
    const found = held.problems.map((_, i) => i).filter((i) => CHANGES[chosen.change](a[i], b[i]));
    if (page === null) page = Math.max(0, found.findIndex((i) => CHANGES.fixed(a[i], b[i]) || CHANGES.broken(a[i], b[i])));
    page = Math.min(page, Math.max(0, found.length - 1));
    try {
      const made = found.length ? await pairOf(r, held, found[page], chosen) : el('p', {}, 'None.');
      if (mine === turn) replaceChildren(list, stepper(found.length, page, (to) => { page = to; draw(true); }), made);
      if (mine === turn && go && found.length) remember('held-out', r, held.mode, held.problems[found[page]]);
    } catch (error) { replaceChildren(list, el('p', { class: 'error' }, String(error.message || error))); }
  };
  reset();
  draw();
  openHeldOut = async (run, mode, problem) => {
    const m = state.data.runs[run]?.held_out.findIndex((one) => one.mode === mode) ?? -1;
    const at = m < 0 ? -1 : state.data.runs[run].held_out[m].problems.indexOf(problem);
    if (at < 0) return;
    Object.assign(chosen, { at: run + '/' + m, change: 'all' });
    reset();
    page = at;
    await draw();
    return document.getElementById('before-after');
  };
  return section('before-after', 'Before and after', 'The same held-out problem at two stages; what only one of them says is marked.'
    + (state.data.runs.some((run) => run.held_out.some((mode) => mode.several)) ? ' Of several samples of a problem it is the first.' : ''), controls, list);
}

function stepper(count, page, go) {
  const button = (text, to) => el('button', { type: 'button', disabled: to < 0 || to >= count, click: () => go(to) }, text);
  return el('div', { class: 'controls' }, el('span', {}, count ? (page + 1) + ' of ' + number(count) : '0'), button('previous', page - 1), button('next', page + 1));
}

async function pairOf(run, held, problem, chosen) {
  const portion = lastNotAbove(held.starts, problem);
  const one = (await unpackBlock('e-' + run + '-' + (held.first_portion + portion)))[problem - held.starts[portion]];
  const [before, after] = [one.said[chosen.before], one.said[chosen.after]];
  const side = (said, stage, which) => el('div', {}, el('h4', {}, stageName(held.stages[stage]), ' ', verdictOf(VERDICT_FLAGS[held.verdicts[stage][problem]] | (said && said[2] !== 'stop' ? TRUNCATED : 0))),
    said ? [differing(before ? before[0] : '', after ? after[0] : '', which), el('p', { class: 'note' }, 'found ' + (said[1] === null ? 'nothing' : said[1]) + ', ' + number(said[3]) + ' tokens')] : el('p', {}, 'not asked'));
  return el('div', {}, el('p', { class: 'question' }, one.question), el('p', { class: 'note' }, held.problems[problem] + ', expected ', el('code', {}, one.expected), anchor(['held-out', run, held.mode, held.problems[problem]], held.problems[problem])),
    el('div', { class: 'pair' }, side(before, chosen.before, 'before'), side(after, chosen.after, 'after')));
}
