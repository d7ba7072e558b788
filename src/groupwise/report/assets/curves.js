// The section of curves: every logged metric, runs laid over each other, in groups by the part before the slash.

const FIRST = ['reward', 'accuracy', 'completions', 'groups', 'policy', 'optimizer', 'speed', 'time', 'memory', 'progress'];

function metricGroups(names) {
  const groups = new Map();
  for (const name of names) {
    const key = name.includes('/') ? name.split('/')[0] : 'other';
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(name);
  }
  const rank = (key) => (FIRST.includes(key) ? FIRST.indexOf(key) : FIRST.length);
  return [...groups].sort((a, b) => rank(a[0]) - rank(b[0]));
}

function metricChart(name) {
  const lines = [];
  state.data.runs.forEach((run, i) => {
    const curve = run.curves[name];
    if (curve && !state.hidden.has(i)) lines.push({ label: run.name, look: runClass(i), ...curve });
  });
  if (!lines.length) return null;
  const [unit, meaning] = state.data.metrics[name] || ['', ''];
  return lineChart(name, unit, meaning, lines);
}

function componentChart(run) {
  const names = Object.keys(run.curves).filter((name) => name.startsWith('reward/') && !['reward/mean', 'reward/std'].includes(name));
  if (names.length < 2) return null;
  const lines = names.map((name, i) => ({ label: name.slice(7), look: runClass(i), ...run.curves[name] }));
  return lineChart('reward components of ' + run.name, 'score', 'Each function’s own score, before its weight.', lines);
}

// Charts are drawn when they come near the window: hundreds of them cost nothing until then.
function lazily(make) {
  const place = el('div', { class: 'place' });
  const draw = () => { const made = make(); if (made) place.replaceChildren(made); else place.remove(); };
  if (typeof IntersectionObserver === 'undefined') { draw(); return place; }
  const observer = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) { observer.disconnect(); draw(); }
  }, { rootMargin: '400px' });
  observer.observe(place);
  return place;
}

function curvesSection() {
  const body = el('div', {});
  const names = Object.keys(state.data.metrics);
  const redraw = () => replaceChildren(body, metricGroups(names).map(([key, members]) => el('details', { open: FIRST.indexOf(key) < 6 && FIRST.includes(key) },
    el('summary', {}, key + ' (' + members.length + ')'),
    el('div', { class: 'charts' }, members.map((name) => lazily(() => metricChart(name)))))));
  const smoothing = el('input', { type: 'range', min: 0, max: 0.98, step: 0.02, value: state.smoothing, 'aria-label': 'Smoothing',
    change: (event) => { state.smoothing = Number(event.target.value); redraw(); } });
  const log = el('input', { type: 'checkbox', change: (event) => { state.logarithmic = event.target.checked; redraw(); } });
  const controls = el('div', { class: 'controls' }, el('label', {}, 'Smoothing ', smoothing), el('label', {}, log, ' logarithmic where possible'), legend(redraw));
  redraw();
  return section('curves', 'Curves', 'Point at a chart, or focus it and use the arrow keys, for the numbers; in brackets the smoothed value.', controls, body);
}

function legend(redraw) {
  if (state.data.runs.length < 2) return null;
  return state.data.runs.map((run, i) => {
    const toggle = (event) => { if (event.target.checked) state.hidden.delete(i); else state.hidden.add(i); redraw(); };
    return el('label', { class: runClass(i) }, el('input', { type: 'checkbox', checked: true, change: toggle }), el('i', { class: 'swatch' }), ' ' + run.name);
  });
}

function distributionsSection() {
  const body = el('div', { class: 'charts' });
  const about = { tokens: ['Length of completions', 'tokens'], advantage: ['Advantages', 'advantage'], reward: ['Rewards', 'reward'] };
  const draw = () => {
    const run = state.data.runs[state.run];
    const fans = Object.entries(run.bands).filter(([, band]) => band.steps.length)
      .map(([name, band]) => lazily(() => fanChart(about[name][0], about[name][1], 'Least, 10%, 25%, median, 75%, 90%, greatest.', band, state.data.quantiles, runClass(state.run))));
    const components = componentChart(run);
    replaceChildren(body, components ? lazily(() => componentChart(run)) : null, fans);
  };
  draw();
  const picker = runPicker((value) => { state.run = value; draw(); });
  return section('distributions', 'Distributions', 'Of the completions that were recorded (output.log_completions groups a step).', picker, body);
}
