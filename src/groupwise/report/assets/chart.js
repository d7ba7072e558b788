// One chart: lines or a fan of quantiles over steps, with a cursor that tells the numbers.

const WIDTH = 400, HEIGHT = 190, PAD_LEFT = 52, PAD_RIGHT = 14, TOP = 8, BOTTOM = 26;

// Exponential smoothing without the bias of a start at 0, as if the curve had always been there.
function smooth(values, weight) {
  if (!weight) return values;
  let running = 0, share = 0;
  return values.map((value) => {
    running = weight * running + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return running / share;
  });
}

// Round numbers that cover a range: about `count` of them, and at least three.
function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0) || !Number.isFinite(span)) return [low];
  for (let finer = count; finer < 3 * count; finer++) {
    const found = roundNumbers(low, high, finer);
    if (found.length > 2) return found;
  }
  return roundNumbers(low, high, 3 * count);
}

function roundNumbers(low, high, count) {
  const span = high - low;
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && found.length < 50; i++) found.push(i * step);
  return found;
}

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : [0, 1];
}

// Every one of the values is above 0, so that a logarithm can be taken.
function positive(lists) {
  return lists.every((list) => list.every((value) => value > 0));
}

function makeScales(stepLists, valueLists) {
  const range = stepRange();
  const [firstStep, lastStep] = extent([range, ...stepLists]);
  let [low, high] = extent(valueLists);
  const log = state.logarithmic && positive(valueLists);
  const of = log ? Math.log10 : (v) => v;
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) {
    const pad = Math.abs(high) * 0.1;
    [low, high] = log ? [low / 2, high * 2] : pad ? [low - pad, high + pad] : [0, 1];
  }
  const margin = (of(high) - of(low)) * 0.04;
  const [bottom, top] = [of(low) - margin, of(high) + margin];
  const stepSpan = Math.max(1, lastStep - firstStep);
  return {
    firstStep, lastStep,
    x: (step) => PAD_LEFT + ((step - firstStep) / stepSpan) * (WIDTH - PAD_LEFT - PAD_RIGHT),
    y: (value) => TOP + ((top - of(value)) / (top - bottom)) * (HEIGHT - TOP - BOTTOM),
    step: (x) => firstStep + ((x - PAD_LEFT) / (WIDTH - PAD_LEFT - PAD_RIGHT)) * stepSpan,
    valueTicks: log ? ticks(bottom, top, 4).map((t) => 10 ** t) : ticks(bottom, top, 4),
    stepTicks: ticks(firstStep, lastStep, 5).filter(Number.isInteger),
  };
}

function axes(scales, write) {
  const grid = scales.valueTicks.map((value) => [
    svg('line', { class: 'grid', x1: PAD_LEFT, x2: WIDTH - PAD_RIGHT, y1: scales.y(value), y2: scales.y(value) }),
    svg('text', { class: 'tick', x: PAD_LEFT - 5, y: scales.y(value) + 3.5, 'text-anchor': 'end' }, write(value)),
  ]);
  const steps = scales.stepTicks.map((step) =>
    svg('text', { class: 'tick', x: scales.x(step), y: HEIGHT - 8, 'text-anchor': 'middle' }, number(step)));
  const name = svg('text', { class: 'tick', x: 2, y: HEIGHT - 8 }, 'step');
  return svg('g', {}, grid, name, steps);
}

function path(scales, steps, values) {
  return steps.map((step, i) => (i ? 'L' : 'M') + scales.x(step).toFixed(1) + ' ' + scales.y(values[i]).toFixed(1)).join('');
}

function area(scales, steps, low, high) {
  const there = path(scales, steps, high);
  const back = steps.map((_, i) => steps.length - 1 - i)
    .map((i) => 'L' + scales.x(steps[i]).toFixed(1) + ' ' + scales.y(low[i]).toFixed(1)).join('');
  return there + back + 'Z';
}

function nearest(steps, wanted) {
  if (!steps.length) return -1;
  const below = lastNotAbove(steps, wanted);
  const above = Math.min(below + 1, steps.length - 1);
  return Math.abs(steps[above] - wanted) < Math.abs(steps[below] - wanted) ? above : below;
}

// The unit is left out where the title says it already, and where the numbers do: shares are written as percentages.
function withUnit(title, unit) {
  return !unit || unit === '1' || unit === 'share' || title.toLowerCase().includes(unit.toLowerCase()) ? title : title + ', ' + unit;
}

// Frame, axes and cursor; `marks` are drawn between, and `tell(step)` gives the readout's pieces.
function frame(title, unit, about, scales, marks, steps, tell) {
  const cursor = svg('line', { class: 'cursor', y1: TOP, y2: HEIGHT - BOTTOM, visibility: 'hidden' });
  const readout = el('div', { class: 'readout', 'aria-live': 'polite' });
  let at = null;
  const move = (step) => {
    at = step;
    cursor.setAttribute('x1', scales.x(step));
    cursor.setAttribute('x2', scales.x(step));
    cursor.setAttribute('visibility', 'visible');
    replaceChildren(readout, tell(step));
  };
  const rest = () => {
    cursor.setAttribute('visibility', 'hidden');
    replaceChildren(readout, tell(scales.lastStep));
  };
  const point = (event) => {
    const box = drawing.getBoundingClientRect();
    const wanted = scales.step(((event.clientX - box.left) / box.width) * WIDTH);
    const i = nearest(steps, wanted);
    if (i >= 0) move(steps[i]);
  };
  const key = (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const i = at === null ? steps.length - 1 : nearest(steps, at) + way;
    move(steps[Math.max(0, Math.min(steps.length - 1, i))]);
  };
  const drawing = svg('svg', {
    viewBox: '0 0 ' + WIDTH + ' ' + HEIGHT, tabindex: 0, role: 'img', 'aria-label': title + ' over steps',
    pointermove: point, pointerdown: point, pointerleave: rest, keydown: key, blur: rest,
  }, axes(scales, writer(unit)), marks, cursor);
  rest();
  return el('figure', { class: 'chart' },
    el('figcaption', {}, withUnit(title, unit), about ? el('small', { class: 'about', title: about }, about) : null), drawing, readout);
}

// `lines`: [{label, look, steps, values, low?, high?}]; `look` is a class that gives the colour.
function lineChart(title, unit, about, lines) {
  const write = writer(unit);
  const smoothed = lines.map((line) => (line.judged ? line.values : smooth(line.values, state.smoothing)));
  const shown = lines.flatMap((line) => (line.low ? [line.low, line.high] : [line.values]));
  const scales = makeScales(lines.map((line) => line.steps), shown);
  const marks = lines.map((line, i) => svg('g', { class: line.look },
    line.low ? svg('path', { class: 'spread', d: area(scales, line.steps, line.low, line.high) }) : null,
    state.smoothing && !line.judged ? svg('path', { class: 'raw', d: path(scales, line.steps, line.values) }) : null,
    line.steps.length === 1 || line.judged ? line.steps.map((step, j) => svg('circle', { class: 'dot', cx: scales.x(step), cy: scales.y(line.values[j]), r: 3 })) : null,
    svg('path', { class: 'line', d: path(scales, line.steps, smoothed[i]) })));
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const tell = (step) => [
    el('span', { class: 'step' }, 'step ' + number(step)),
    ...lines.map((line, i) => {
      const near = nearest(line.steps, step);
      const smoothing = line.judged ? ' [' + [line.low[near], line.high[near]].map((v) => (100 * v).toFixed(1)).join(', ') + ']' : state.smoothing ? ' (' + write(smoothed[i][near]) + ')' : '';
      const outside = step < line.steps[0] || step > line.steps[line.steps.length - 1];
      const elsewhere = outside ? ' at step ' + number(line.steps[near]) : '';  // a shorter run is not where the pointer is
      return el('span', { class: line.look }, el('i', { class: 'swatch' }), (lines.length > 1 ? line.label + ' ' : '') + write(line.values[near]) + smoothing + elsewhere);
    }),
  ];
  return frame(title, unit, about, scales, marks, steps, tell);
}

// A distribution over steps: lightest from least to greatest, darker from 10% to 90% and 25% to 75%, the median as a line.
function fanChart(title, unit, about, band, quantiles, look) {
  const rows = band.quantiles, middle = (rows.length - 1) / 2;
  const scales = makeScales([band.steps], rows);
  const layers = [];
  for (let i = 0; i < middle; i++) {
    layers.push(svg('path', { class: 'fan', d: area(scales, band.steps, rows[i], rows[rows.length - 1 - i]) }));
  }
  const marks = svg('g', { class: look }, layers, svg('path', { class: 'line', d: path(scales, band.steps, rows[middle]) }));
  const names = quantiles.map((q) => (q === 0 ? 'least' : q === 1 ? 'greatest' : q === 0.5 ? 'median' : Math.round(100 * q) + '%'));
  const tell = (step) => {
    const i = nearest(band.steps, step);
    return [el('span', { class: 'step' }, 'step ' + number(band.steps[i])), ...rows.map((row, q) => el('span', {}, names[q] + ' ' + number(row[i])))];
  };
  return frame(title, unit, about, scales, marks, band.steps, tell);
}
