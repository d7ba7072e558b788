// Overview, findings, evaluations, settings and environment.

// Where a table is wider than the window, a line above says so, and the arrow keys move it.
const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const wider = target.scrollWidth > target.clientWidth;
    target.classList.toggle('wider', wider);
    if (wider) target.tabIndex = 0; else target.removeAttribute('tabindex');
  }
});

function scrolling(content) {
  const box = el('div', { class: 'scroll' }, content);
  widths.observe(box);
  return box;
}

// With `numeric`, columns stay on one line, and those of nothing but numbers stand at the right.
function table(head, rows, numeric) {
  const plain = (cell) => ['string', 'number'].includes(typeof cell) && /^[-–\d.,e%]+$/.test(String(cell));
  const look = head.map((_, i) => (numeric && i ? (rows.length && rows.every((row) => plain(row[i])) ? 'numeric right' : 'numeric') : false));
  return scrolling(el('table', {},
    el('thead', {}, el('tr', {}, head.map((name, i) => el('th', { scope: 'col', class: look[i] }, name)))),
    el('tbody', {}, rows.map((row) => el('tr', {}, row.map((cell, i) => el(i ? 'td' : 'th', { class: look[i], scope: i ? false : 'row' }, cell)))))));
}

// Mean over the first tenth of the steps and over the last.
function firstToLast(run, name) {
  const curve = run.curves[name], write = writer((state.data.metrics[name] || [''])[0]);
  if (!curve || !curve.values.length) return '–';
  const count = Math.max(1, Math.round(curve.values.length / 10));
  const mean = (values) => Number((values.reduce((a, b) => a + b, 0) / values.length).toPrecision(3));
  return curve.values.length < 2 ? write(curve.values[0]) : write(mean(curve.values.slice(0, count))) + ' → ' + write(mean(curve.values.slice(-count)));
}

// The last evaluation in the run's headline mode, or else in any, and the model as it was in the same mode.
function heldOutOf(run) {
  const last = run.evaluations.filter((row) => row.mode === run.headline).at(-1) || run.evaluations.at(-1);
  if (!last) return null;
  const base = run.evaluations.find((row) => row.stage === 'base' && row.mode === last.mode && row !== last);
  const key = last.success && (!base || base.success) ? 'success' : 'strict';  // what an environment said goes before the answer
  return { last, base, key };
}

function gravest(run) {
  return run.findings.filter((one) => ['critical', 'warning'].includes(one.severity)).length;
}

// What one run came to, in a few numbers.
function tiles(run) {
  const held = heldOutOf(run), grave = gravest(run), [verdict, why] = run.verdict.split(': ');
  const several = (name) => Boolean(run.curves[name] && run.curves[name].values.length > 1);
  const tile = (name, value, remark) => el('div', { class: 'tile' }, el('dt', {}, name), el('dd', {}, el('b', {}, value), remark ? el('small', {}, remark) : null));
  return el('dl', { class: 'tiles' },
    held ? tile(held.key === 'success' ? 'Held-out success' : 'Held-out accuracy', (held.base ? percent(held.base[held.key][0]) + ' → ' : '') + percent(held.last[held.key][0]),
      held.key + ', ' + held.last.mode + ', ' + (held.base ? 'base → ' : '') + stageName(held.last.stage) + '; 95% interval ' + interval(held.last[held.key]).replace(/^\S+ /, '')) : null,
    tile('Reward', firstToLast(run, 'reward/mean'), several('reward/mean') ? 'mean of the first → last tenth of the steps' : null),
    tile('Accuracy in training', firstToLast(run, 'accuracy/strict'), several('accuracy/strict') ? 'strict, first → last tenth of the steps' : 'strict'),
    tile('Steps', number(run.steps) + (run.planned_steps ? ' of ' + number(run.planned_steps) : ''), run.state + (run.seconds === null ? '' : ', ' + clock(run.seconds) + (run.seconds < 3600 ? ' min' : ' h'))),
    tile('The doctor says', grave ? el('a', { href: '#findings' }, grave + (grave > 1 ? ' things to look at' : ' thing to look at')) : verdict, grave ? 'critical findings and warnings' : why));
}

function overviewTable(runs) {
  const rows = runs.map((run, i) => {
    const held = heldOutOf(run), grave = gravest(run);
    return [
      el('span', { class: runClass(i) }, el('i', { class: 'swatch' }), ' ' + run.name),
      number(run.steps) + (run.planned_steps ? ' of ' + number(run.planned_steps) : ''), run.state,
      run.seconds === null ? '–' : clock(run.seconds), firstToLast(run, 'reward/mean'), firstToLast(run, 'accuracy/strict'),
      held ? (held.base ? percent(held.base[held.key][0]) + ' → ' : '') + interval(held.last[held.key]) + ', ' + (held.key === 'success' ? 'success, ' : '') + held.last.mode : '–', grave ? el('a', { href: '#findings' }, String(grave)) : run.verdict.split(': ')[0],
    ];
  });
  return [table(['run', 'steps', 'state', 'time', 'reward', 'accuracy in training', 'held-out accuracy', 'findings'], rows, true),
    el('p', { class: 'note' }, 'Reward and accuracy in training: means of the first and the last tenth of the steps. Held-out accuracy: the base model and the last evaluation, with its 95% interval: strict, or the success that an environment tells.')];
}

function overviewSection() {
  const unread = state.data.runs.flatMap((run) => Object.entries(run.unreadable).map(([file, count]) => run.name + ': ' + count + ' of ' + file));
  return section('overview', 'Overview', null,
    state.data.runs.length > 1 ? overviewTable(state.data.runs) : tiles(state.data.runs[0]),
    unread.length ? el('p', { class: 'note' }, 'Could not be read and was left out: ' + unread.join('; ') + '.') : null);
}

// A sentence begins with a capital, but not where it begins with a setting's or a metric's name.
function sentence(text) {
  return (/^\S*[./_]/.test(text) ? text : text[0].toUpperCase() + text.slice(1)) + '.';
}

function finding(one, run) {
  const examples = one.examples.map((example) => el('div', { class: 'example' },
    el('div', { class: 'note' }, example.where + (example.remark ? ' — ' + example.remark : '')), el('pre', {}, example.text)));
  const steps = one.steps ? (one.steps[0] === one.steps[1] ? 'step ' + one.steps[0] : 'steps ' + one.steps[0] + ' to ' + one.steps[1]) : null;
  const title = [el('span', { class: 'badge' }, one.severity), ' ' + one.title, steps ? el('small', {}, ' ' + steps) : null];
  const calm = one.severity === 'normal';  // what is as it should be takes one line, until somebody asks
  const id = 'finding-' + (run ? run + '-' : '') + slug(one.rule);
  title.push(anchor(id, one.title));
  return el(calm ? 'details' : 'article', { id, class: 'finding ' + one.severity }, calm ? el('summary', {}, el('b', {}, title)) : el('h4', {}, title),
    el('p', {}, sentence(one.summary)), el('p', { class: 'note' }, one.meaning), el('p', {}, one.severity === 'normal' ? null : el('b', {}, 'Remedy: '), one.remedy),
    examples.length ? el('details', {}, el('summary', {}, examples.length + (examples.length > 1 ? ' examples' : ' example')), examples) : null);
}

function findingsSection() {
  const parts = state.data.runs.map((run, i) => {
    return el('div', {}, state.data.runs.length > 1 ? el('h3', {}, run.name) : null,
      gravest(run) ? null : el('p', {}, run.verdict + '.'), run.findings.map((one) => finding(one, i)));
  });
  return section('findings', 'What the doctor finds', null, parts);
}

function evaluationsSection() {
  const parts = state.data.runs.filter((run) => run.evaluations.length).map((run) => {
    const rows = run.evaluations.map((row) => [stageName(row.stage) + ', ' + row.mode, interval(row.strict), interval(row.lenient),
      interval(row.format), interval(row.stopped), number(row.tokens), number(row.n)]);
    const pairs = run.comparisons.map((c) => [stageName(c.before) + ' → ' + stageName(c.after) + ', ' + c.mode + (c.key === 'strict' ? '' : ', ' + c.key), c.fixed, c.broken,
      c.both_right ?? '–', c.both_wrong ?? '–', c.p_value < 1e-4 ? c.p_value.toExponential(1) : c.p_value.toFixed(4)]);
    return el('div', {}, el('h3', {}, run.name),
      table(['stage', 'strict', 'lenient', 'format', 'stopped', 'mean tokens', 'problems'], rows, true),
      run.asked.map((line) => el('p', { class: 'note' }, line)),
      playedTable(run.evaluations),
      pairs.length ? table(['problem by problem', 'fixed', 'broken', 'right both times', 'wrong both times', 'p'], pairs, true) : null,
      pairs.length ? el('p', { class: 'note' }, 'Fixed: wrong before and right after; broken: the other way round. p: how likely so uneven a split of the two would be if both stages were equally good (exact McNemar test).'
        + (run.comparisons.some((c) => c.samples > 1) ? ' Where a problem was sampled several times, fixed and broken are those that got better and worse, and the test is the exact paired permutation test.' : '')) : null);
  });
  const note = 'Held-out problems, with 95% intervals (Wilson; clustered by problem where it was sampled several times). Strict: the answer stands where the format asks for it; lenient: it is found anywhere; format: exactly the form asked for; stopped: the model ended by itself.';
  return parts.length ? section('evaluation', 'Evaluation', note, parts) : null;
}

// What went on in episodes, where the run has some.
function playedTable(evaluations) {
  const rows = evaluations.filter((row) => row.episodes);
  if (!rows.length) return null;
  const share_ = (value) => (value === undefined ? '–' : percent(value));
  return [table(['episodes', 'success', 'reward', 'turns', 'calls', 'invalid calls', 'failed calls', 'tokens sampled', 'tokens given'], rows.map(({ stage, mode, success, episodes: e, turns_interval: ends }) => [
    stageName(stage) + ', ' + mode, success ? interval(success) : '–', number(e.reward), number(e.turns) + (ends ? ' [' + ends.map(number).join(', ') + ']' : ''), number(e.calls), share_(e.invalid_calls), share_(e.failed_calls), number(e.sampled_tokens), number(e.given_tokens)]), true),
  el('p', { class: 'note' }, 'Means of an episode. Success: the environment gave more than 0. Invalid and failed: of the calls, those that could not be made and those in which the tool did wrong.')];
}

function differencesTable(rows, names) {
  return named(['', ...names], rows.map((row) => [row.path, ...row.values.map((value) => (value === null ? '–' : value))]));
}

// A table whose first column has names of settings, which are not broken in the middle where there is room.
function named(head, rows) {
  const made = table(head, rows, false);
  made.classList.add('named');
  return made;
}

function folded(title, rows, open) {
  if (!rows.length) return null;
  return el('details', { open }, el('summary', {}, title + ' (' + rows.length + ')'), named(['name', 'value'], rows));
}

function settingsSection() {
  const { runs } = state.data;
  const names = runs.map((run) => run.name);
  const parts = [];
  for (const [key, title] of [['settings', 'Settings'], ['environment', 'Environment']]) {
    const rows = state.data[key + '_differences'];
    if (runs.length > 1) {
      parts.push(el('h3', {}, title + ': where the runs differ'), rows.length ? differencesTable(rows, names) : el('p', {}, 'Nowhere.'));
    }
    parts.push(...runs.flatMap((run) => {
      const chosen = key === 'settings' && run.chosen.length ? run.chosen.map((path) => [path, run.settings[path]]) : null;
      const all = Object.entries(run[key]);
      return [
        chosen ? folded('Settings of ' + run.name + ' that are not the defaults', chosen, runs.length === 1) : null,
        folded((chosen ? 'All settings' : title) + ' of ' + run.name, all, false)];
    }));
  }
  return section('settings', 'Settings and environment', null, parts);
}
