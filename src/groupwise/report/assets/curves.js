// The section of curves: every logged metric, runs laid over each other, in groups by the part before the slash.

const FIRST = ['reward', 'evaluation', 'accuracy', 'completions', 'groups', 'policy', 'optimizer', 'speed', 'time', 'memory', 'progress'];

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

function metricLines(name) {
  const lines = [];
  state.data.runs.forEach((run, i) => {
    const curve = run.curves[name];
    if (curve && !state.hidden.has(i)) lines.push({ label: run.name, look: runClass(i), judged: name.startsWith('evaluation/'), taken: run.taken, ...curve });
  });
  return lines;
}

// One range for all charts, so that what happened at the same time stands at the same place.
function stepRange() {
  return extent(state.data.runs.filter((_, i) => !state.hidden.has(i)).flatMap((run) => Object.values(run.curves).map((curve) => places(run.taken, [curve.steps[0], curve.steps.at(-1)]))));
}

function unitAndMeaning(name) {
  return state.data.metrics[name] || ['', ''];
}

function metricChart(name) {
  const lines = metricLines(name);
  return lines.length ? lineChart('curve-' + slug(name), name, ...unitAndMeaning(name), lines) : null;
}

// One value in all steps of all runs shown: said in a line, since a chart of it shows nothing.
function constantOf(name) {
  const lines = metricLines(name);
  if (!lines.length || lines.some((line) => line.steps.length < 2)) return null;
  const value = lines[0].values[0];
  return lines.every((line) => [line.values, line.low || [], line.high || []].every((list) => list.every((v) => v === value))) ? value : null;
}

function metricGroup(members) {
  const still = members.filter((name) => constantOf(name) !== null), moving = members.filter((name) => !still.includes(name));
  return [
    moving.length ? el('div', { class: 'charts' }, moving.map((name) => lazily(() => metricChart(name), 'curve-' + slug(name)))) : null,
    still.length ? el('p', { class: 'note still' }, 'The same in every step: ', still.map((name, i) => {
      const [unit, meaning] = unitAndMeaning(name);
      return [i ? '; ' : '', el('span', { title: meaning || false }, name + ' ', el('b', {}, writer(unit)(constantOf(name))))];
    }), '.') : null,
  ];
}

function componentChart(run) {
  const names = Object.keys(run.curves).filter((name) => name.startsWith('reward/') && !['reward/mean', 'reward/std'].includes(name));
  if (names.length < 2) return null;
  const lines = names.map((name, i) => ({ label: name.slice(7), look: runClass(i), taken: run.taken, ...run.curves[name] }));
  return lineChart('distribution-components', 'Reward components' + (state.data.runs.length > 1 ? ' of ' + run.name : ''), 'score', 'Each function’s own mean score, before its weight.', lines);
}

// Charts are drawn when they come near the window: hundreds of them cost nothing until then. The event 'draw' does it at once, or again.
function lazily(make, id) {
  const place = el('div', { class: 'place', id });
  const draw = () => { const made = make(); if (made) place.replaceChildren(made); else place.remove(); };
  place.addEventListener('draw', draw);
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
  if (!names.length) return section('curves', 'Curves', 'There are no steps yet.');
  const open = new Map();  // what somebody folded or unfolded stays so
  const redraw = () => replaceChildren(body, metricGroups(names).map(([key, members]) => el('details', { id: 'curves-' + slug(key),
    open: open.get(key) ?? (FIRST.indexOf(key) < 7 && FIRST.includes(key)), toggle: (event) => open.set(key, event.target.open) },
  el('summary', {}, key + ' (' + members.length + ')'), metricGroup(members))));
  const smoothing = el('input', { type: 'range', min: 0, max: 0.98, step: 0.02, value: state.smoothing, 'aria-label': 'Smoothing',
    change: (event) => { state.smoothing = Number(event.target.value); redrawCharts(); } });
  const log = el('input', { type: 'checkbox', change: (event) => { state.logarithmic = event.target.checked; redrawCharts(); } });
  const axis = axesOffered().length > 1 ? select('Along', axesOffered(), state.axis, (value) => { state.axis = value; zoomTo(null); }) : null;
  const controls = el('div', { class: 'controls' }, el('label', {}, 'Smoothing ', smoothing), el('label', {}, log, ' logarithmic where possible'), axis, rangeBoxes(), legend(redraw));
  redraw();
  return section('curves', 'Curves', 'Where learning shows: reward/mean, accuracy/strict and, on problems that are not trained on, evaluation/… rise together; a reward that rises alone is being gamed. What to worry about: completions/truncated rises, policy/entropy falls to 0 without a gain in accuracy, groups/zero_variance nears 100%. Point at a chart, or focus it and use the arrow keys, for the numbers; in brackets the smoothed value. Drag over a chart to zoom, double-click (or Esc) for the whole. Triangles at an edge are values far outside.', controls, body);
}

// The range of all charts in numbers, for those who do not drag.
function rangeBoxes() {
  const read = (id, other) => { const text = document.getElementById(id).value.trim(); return text === '' || Number.isNaN(Number(text)) ? other : Number(text); };
  const change = () => {
    const [first, last] = stepRange(), range = [read('zoom-from', first), read('zoom-to', last)];
    zoomTo(range[0] < range[1] && (range[0] > first || range[1] < last) ? range : null);
  };
  const box = (id, label) => el('label', {}, label + ' ', el('input', { id, size: 5, inputmode: 'decimal', change }));
  return [box('zoom-from', 'From'), box('zoom-to', 'to'), el('button', { type: 'button', id: 'zoom-out', click: () => zoomTo(null) }, 'whole range')];
}

function legend(redraw) {
  if (state.data.runs.length < 2) return null;
  return state.data.runs.map((run, i) => {
    const toggle = (event) => { if (event.target.checked) state.hidden.delete(i); else state.hidden.add(i); redraw(); };
    return el('label', { class: runClass(i) }, el('input', { type: 'checkbox', checked: true, change: toggle }), el('i', { class: 'swatch' }), ' ' + run.name);
  });
}

function distributionsSection() {
  if (!state.data.runs.some((run) => Object.keys(run.bands).length || componentChart(run))) return null;
  const body = el('div', { class: 'charts' });
  const about = { tokens: ['Length of completions', 'tokens'], advantage: ['Advantages', 'advantage'], reward: ['Rewards', 'reward'] };
  let shown = state.run;  // a choice of this section alone
  const draw = () => {
    const run = state.data.runs[shown];
    const fans = Object.entries(run.bands).filter(([, band]) => band.steps.length)
      .map(([name, band]) => lazily(() => fanChart('distribution-' + name, about[name][0], about[name][1], 'The line is the median. From dark to light: the middle half, 10% to 90%, min to max.', run, band, state.data.quantiles, runClass(shown)), 'distribution-' + name));
    const components = componentChart(run);
    replaceChildren(body, components ? lazily(() => componentChart(run), 'distribution-components') : null, fans);
  };
  draw();
  const picker = runPicker((value) => { shown = value; draw(); });
  return section('distributions', 'Distributions', 'Of the completions that were recorded (output.log_completions groups a step).', picker, body);
}
