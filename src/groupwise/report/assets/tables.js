// Overview, findings, evaluations, settings and environment.

function table(head, rows, numeric) {
  return el('div', { class: 'scroll' }, el('table', {},
    el('thead', {}, el('tr', {}, head.map((name) => el('th', { scope: 'col' }, name)))),
    el('tbody', {}, rows.map((row) => el('tr', {}, row.map((cell, i) => el(i ? 'td' : 'th', { class: numeric && i ? 'numeric' : false, scope: i ? false : 'row' }, cell)))))));
}

function lastValue(run, name) {
  const curve = run.curves[name];
  return curve && curve.values.length ? number(curve.values[curve.values.length - 1]) : '–';
}

function overviewSection() {
  const rows = state.data.runs.map((run, i) => {
    const final = run.evaluations.filter((row) => row.stage !== 'base').at(-1);
    const grave = run.findings.filter((finding) => ['critical', 'warning'].includes(finding.severity)).length;
    return [
      el('span', { class: runClass(i) }, el('i', { class: 'swatch' }), ' ' + run.name),
      number(run.steps) + (run.planned_steps ? ' of ' + number(run.planned_steps) : ''), run.state,
      run.seconds === null ? '–' : clock(run.seconds), lastValue(run, 'reward/mean'), lastValue(run, 'accuracy/strict'),
      final ? interval(final.strict) : '–', grave ? el('a', { href: '#findings' }, String(grave)) : 'none',
    ];
  });
  const unread = state.data.runs.flatMap((run) => Object.entries(run.unreadable).map(([file, count]) => run.name + ': ' + count + ' of ' + file));
  return section('overview', 'Overview', null,
    table(['run', 'steps', 'state', 'time', 'last reward', 'last accuracy', 'held out, strict', 'findings'], rows, true),
    unread.length ? el('p', { class: 'note' }, 'Could not be read and was left out: ' + unread.join('; ') + '.') : null);
}

function finding(one) {
  const examples = one.examples.map((example) => el('div', { class: 'example' },
    el('div', { class: 'note' }, example.where + (example.remark ? ' — ' + example.remark : '')), el('pre', {}, example.text)));
  const steps = one.steps ? (one.steps[0] === one.steps[1] ? 'step ' + one.steps[0] : 'steps ' + one.steps[0] + ' to ' + one.steps[1]) : null;
  return el('article', { class: 'finding ' + one.severity },
    el('h4', {}, el('span', { class: 'badge' }, one.severity), ' ' + one.title, steps ? el('small', {}, ' ' + steps) : null),
    el('p', {}, one.summary[0].toUpperCase() + one.summary.slice(1) + '.'), el('p', { class: 'note' }, one.meaning), el('p', {}, one.severity === 'normal' ? null : el('b', {}, 'Remedy: '), one.remedy),
    examples.length ? el('details', {}, el('summary', {}, examples.length + (examples.length > 1 ? ' examples' : ' example')), examples) : null);
}

function findingsSection() {
  const parts = state.data.runs.map((run) => {
    const ailing = run.findings.some((one) => one.severity !== 'normal');
    return el('div', {}, state.data.runs.length > 1 ? el('h3', {}, run.name) : null,
      ailing ? null : el('p', {}, 'Nothing ails this run, as far as can be seen.'), run.findings.map(finding));
  });
  return section('findings', 'What the doctor finds', null, parts);
}

function evaluationsSection() {
  const parts = state.data.runs.filter((run) => run.evaluations.length).map((run) => {
    const rows = run.evaluations.map((row) => [stageName(row.stage) + ', ' + row.mode, interval(row.strict), interval(row.lenient),
      interval(row.format), interval(row.stopped), number(row.tokens), number(row.n)]);
    const pairs = run.comparisons.map((c) => [stageName(c.before) + ' → ' + stageName(c.after) + ', ' + c.mode, c.fixed, c.broken,
      c.both_right, c.both_wrong, c.p_value < 1e-4 ? c.p_value.toExponential(1) : c.p_value.toFixed(4)]);
    return el('div', {}, el('h3', {}, run.name),
      table(['stage', 'strict', 'lenient', 'format', 'stopped', 'tokens', 'n'], rows, true),
      run.asked.map((line) => el('p', { class: 'note' }, line)), evaluationChart(run),
      pairs.length ? table(['problem by problem', 'fixed', 'broken', 'both right', 'both wrong', 'p (McNemar)'], pairs, true) : null);
  });
  const note = 'Held-out problems, with 95% intervals (Wilson; clustered by problem where it was sampled several times). Strict: the answer stands where the format asks for it; lenient: it is found anywhere.';
  return parts.length ? section('evaluation', 'Evaluation', note, parts) : null;
}

// Strict accuracy with its interval, where there were evaluations in mid-run.
function evaluationChart(run) {
  const modes = [...new Set(run.evaluations.map((row) => row.mode))];
  const at = (row) => (row.step !== null ? row.step : row.stage === 'final' ? run.steps : row.stage === 'warm_start' || row.stage === 'base' ? 0 : null);
  const lines = modes.map((mode, i) => {
    const last = new Map(run.evaluations.filter((row) => row.mode === mode && at(row) !== null).map((row) => [at(row), row]));
    const rows = [...last].sort((a, b) => a[0] - b[0]).map(([, row]) => row);
    return { label: mode, look: runClass(i), steps: rows.map(at), values: rows.map((r) => r.strict[0]), low: rows.map((r) => r.strict[1]), high: rows.map((r) => r.strict[2]) };
  }).filter((line) => line.steps.length > 2);
  if (!lines.length) return null;
  const kept = state.smoothing;
  state.smoothing = 0;
  const made = lineChart('held-out strict accuracy of ' + run.name, 'share', 'With 95% intervals.', lines);
  state.smoothing = kept;
  return el('div', { class: 'charts' }, made);
}

function differencesTable(rows, names) {
  return table(['', ...names], rows.map((row) => [row.path, ...row.values.map((value) => (value === null ? '–' : value))]), false);
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
    parts.push(...runs.map((run) => el('details', {}, el('summary', {}, title + ' of ' + run.name),
      table(['', ''], Object.entries(run[key]), false))));
  }
  return section('settings', 'Settings and environment', null, parts);
}
