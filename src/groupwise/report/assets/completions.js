// The browser of completions: filters over columns of numbers; texts are unpacked for what is on the screen.

const RIGHT = 1, WRONG = 2, LENIENT = 4, TRUNCATED = 8, CALLS = 16, INVALID = 32, FAILED = 64, PAGE = 20;
const VERDICTS = {
  all: () => true, right: (f) => f & RIGHT, wrong: (f) => f & WRONG, elsewhere: (f) => f & LENIENT && !(f & RIGHT), unknown: (f) => !(f & (RIGHT | WRONG)),
};
const CALLED = { all: () => true, some: (f) => f & CALLS, none: (f) => !(f & CALLS), invalid: (f) => f & INVALID, failed: (f) => f & FAILED };
const tablesByRun = new Map();

function completionsOf(index) {
  if (!tablesByRun.has(index)) {
    const { transcripts } = state.data.runs[index];
    tablesByRun.set(index, inflate(transcripts.columns).then((bytes) => withGroups({ ...transcripts, index, ...splitColumns(bytes, transcripts.count) })));
  }
  return tablesByRun.get(index);
}

// First row of every group, so that a row is found inside its group.
function withGroups(table) {
  table.firstRow = [];
  for (let i = 0; i < table.count; i++) if (i === 0 || table.group[i] !== table.group[i - 1]) table.firstRow.push(i);
  return table;
}

// What is asked, without the template, the system prompt and whatever else all prompts of the run share.
function questionOf(table, group) {
  const [before, after] = table.around;
  return group.prompt.slice(before, group.prompt.length - after).trim();
}

async function groupAt(table, group) {
  const portion = lastNotAbove(table.starts, group);
  return (await unpackBlock('c-' + table.index + '-' + portion))[group - table.starts[portion]];
}

function matching(table, filter) {
  const verdict = VERDICTS[filter.verdict];
  const wanted = filter.problem.toLowerCase();
  const problems = wanted ? table.problems.map((name) => name.toLowerCase().includes(wanted)) : null;
  const found = [];
  for (let i = 0; i < table.count; i++) {
    if (table.step[i] < filter.from || table.step[i] > filter.to || !verdict(table.flags[i])) continue;
    if (filter.cut !== 'all' && Boolean(table.flags[i] & TRUNCATED) !== (filter.cut === 'cut')) continue;
    if (!CALLED[filter.calls](table.flags[i])) continue;
    if (filter.min !== null && !(table.reward[i] >= filter.min)) continue;
    if (filter.max !== null && !(table.reward[i] <= filter.max)) continue;
    if (problems && !problems[table.problem[i]]) continue;
    found.push(i);
  }
  if (filter.sort !== 'order') {
    const [key, sign] = [filter.sort.slice(1), filter.sort[0] === '-' ? -1 : 1];
    const value = (i) => (Number.isNaN(table[key][i]) ? -Infinity : table[key][i]);
    found.sort((a, b) => sign * (value(a) - value(b)) || a - b);
  }
  return found;
}

// Rows among `rows` whose text contains the words. Texts are searched in the order in which they lie: each portion is unpacked once.
async function searched(table, rows, words, alive) {
  if (!words) return rows;
  const wanted = words.toLowerCase(), found = new Set();
  for (const i of [...rows].sort((a, b) => a - b)) {
    if (!alive()) return [];
    const group = await groupAt(table, table.group[i]);
    if (group.rows[i - table.firstRow[table.group[i]]].t.toLowerCase().includes(wanted)) found.add(i);
  }
  return rows.filter((i) => found.has(i));
}

function verdictOf(flags) {
  const word = flags & RIGHT ? 'right' : flags & LENIENT ? 'right, but not in form' : flags & WRONG ? 'wrong' : 'not judged';
  return el('span', { class: 'verdict ' + (flags & RIGHT ? 'right' : flags & LENIENT ? 'elsewhere' : flags & WRONG ? 'wrong' : '') }, word + (flags & TRUNCATED ? ', cut' : ''));
}

function completionsSection() {
  if (!state.data.runs.some((run) => run.transcripts && run.transcripts.count)) return null;
  const filter = { from: 0, to: Infinity, min: null, max: null, verdict: 'all', cut: 'all', calls: 'all', problem: '', words: '', sort: 'order' };
  const list = el('div', {}), detail = el('div', { id: 'group' });
  const wide = { ...filter };
  let page = 0, turn = 0;
  const clear = () => {
    Object.assign(filter, wide);
    for (const box of controls.querySelectorAll('input')) box.value = '';
    for (const box of controls.querySelectorAll('select:not([aria-label=Run])')) box.selectedIndex = 0;
    page = 0;
    update();
  };
  const update = async () => {
    const mine = ++turn, alive = () => mine === turn;
    if (!state.data.runs[state.run].transcripts) { replaceChildren(list, el('p', {}, 'This run has no recorded completions.')); return; }
    try {
      const table = await completionsOf(state.run);
      if (filter.words) replaceChildren(list, el('p', { class: 'note' }, 'Looking through the texts …'));
      const rows = await searched(table, matching(table, filter), filter.words, alive);
      if (!alive()) return;
      page = Math.min(page, Math.max(0, Math.ceil(rows.length / PAGE) - 1));
      if (!rows.length) {
        replaceChildren(detail);
        replaceChildren(list, pager(0, 0, () => {}), el('p', { id: 'nothing' }, 'Nothing matches. ', el('button', { type: 'button', click: clear }, 'clear the filters')));
        return;
      }
      const made = await rowsOf(table, rows.slice(page * PAGE, (page + 1) * PAGE), (row) => showGroup(detail, table, row));
      if (alive()) replaceChildren(list, pager(rows.length, page, (to) => { page = to; update(); }), made);
    } catch (error) { replaceChildren(list, el('p', { class: 'error' }, String(error.message || error))); }
  };
  const set = (key, read) => (event) => { filter[key] = read(event.target.value); page = 0; update(); };
  const parsed = (other) => (text) => (text.trim() === '' || Number.isNaN(Number(text)) ? other : Number(text));
  const box = (label, key, read, size) => el('label', {}, label + ' ', el('input', { size, change: set(key, read), 'aria-label': label }));
  const choose = (label, key, options) => select(label, options, filter[key], (value) => { filter[key] = value; page = 0; update(); });
  const controls = el('div', { class: 'controls' }, runPicker((value) => { state.run = value; page = 0; replaceChildren(detail); offer(); update(); }),
    box('Step from', 'from', parsed(0), 5), box('to', 'to', parsed(Infinity), 5), box('Reward from', 'min', parsed(null), 5), box('up to', 'max', parsed(null), 5),
    choose('Answer', 'verdict', [['all', 'all'], ['right', 'right'], ['wrong', 'wrong'], ['elsewhere', 'right, not in form'], ['unknown', 'not judged']]),
    choose('End', 'cut', [['all', 'all'], ['ended', 'ended by itself'], ['cut', 'cut at the limit']]),
    state.data.runs.some((run) => run.transcripts?.episodes) ? choose('Calls', 'calls', [['all', 'all'], ['some', 'with calls'], ['none', 'without'], ['invalid', 'with one that could not be made'], ['failed', 'with one that failed']]) : null,
    choose('Order', 'sort', [['order', 'as written'], ['-reward', 'reward, highest first'], ['+reward', 'reward, lowest first'], ['-tokens', 'longest first'], ['+advantage', 'advantage, lowest first'], ['-advantage', 'advantage, highest first'], ['-step', 'latest first']]),
    box('Problem', 'problem', (text) => text.trim(), 14), box('Words', 'words', (text) => text.trim(), 14));
  const follow = el('span', {});
  const offer = async () => replaceChildren(follow, state.data.runs[state.run].transcripts ? followed(await completionsOf(state.run), detail) : null);
  controls.append(follow);
  offer();
  update();
  return section('completions', 'Completions', 'Choose a row to see its whole group, and how scores became advantages.', controls, list, detail);
}

// Groups of every problem, in the order of steps.
function groupsByProblem(table) {
  if (!table.byProblem) {
    table.byProblem = table.problems.map(() => []);
    table.firstRow.forEach((row, g) => table.byProblem[table.problem[row]].push(g));
  }
  return table.byProblem;
}

// A choice of the problems that came at several steps, the most frequent first.
const MOST_FOLLOWED = 200;

function followed(table, detail) {
  const found = groupsByProblem(table).map((groups, problem) => [problem, groups]).filter(([, groups]) => groups.length > 1)
    .sort((a, b) => b[1].length - a[1].length).slice(0, MOST_FOLLOWED);
  if (!found.length) return null;
  const options = [['', 'choose'], ...found.map(([problem, groups]) => [problem, table.problems[problem] + ' (' + groups.length + ' steps)'])];
  return select('Follow a problem', options, '', (value) => value !== '' && showGroup(detail, table, table.firstRow[groupsByProblem(table)[value].at(-1)]));
}

// `completion/RUN/STEP/PROBLEM/SAMPLE` of an address: its group is shown. Gives the place to look at, as does `openHeldOut`.
async function openCompletion(run, step, problem, sample) {
  if (!state.data.runs[run]?.transcripts) return;
  const table = await completionsOf(Number(run));
  const row = table.step.findIndex((at, i) => at === Number(step) && table.problems[table.problem[i]] === problem && table.sample[i] === Number(sample));
  if (row < 0) return;
  const place = document.getElementById('group');
  await showGroup(place, table, row);
  return place;
}

function pager(count, page, go) {
  const last = Math.max(0, Math.ceil(count / PAGE) - 1);
  const button = (text, to) => el('button', { type: 'button', disabled: to < 0 || to > last || to === page, click: () => go(to) }, text);
  return el('div', { class: 'controls', id: 'pager' }, el('span', { id: 'count' }, number(count) + ' completions'),
    button('first', 0), button('previous', page - 1), el('span', {}, 'page ' + (page + 1) + ' of ' + (last + 1)), button('next', page + 1), button('last', last));
}

async function rowsOf(table, rows, open) {
  const made = [];
  for (const [place, i] of rows.entries()) {
    const group = await groupAt(table, table.group[i]);
    const asked = place === 0 || table.group[rows[place - 1]] !== table.group[i];  // said once for neighbours
    const { t: text, u: turns } = group.rows[i - table.firstRow[table.group[i]]];
    const played = turns ? number(turns.filter(sampledTurn).length) + ' turns, ' + number(turns.flatMap((turn) => turn[3]).length) + ' calls · ' : '';
    const excerpt = shortened(text, 140, 70);
    const chosen = (event) => {
      for (const other of event.currentTarget.parentNode.children) other.removeAttribute('aria-current');
      event.currentTarget.setAttribute('aria-current', 'true');
      open(i);
    };
    made.push(el('button', { type: 'button', class: 'row', click: chosen },
      el('span', { class: 'facts' }, 'step ' + table.step[i] + ' · ' + group.problem + ' #' + table.sample[i], el('br'),
        'reward ' + number(table.reward[i]) + ' · advantage ' + number(table.advantage[i]) + ' · ' + number(table.tokens[i]) + ' tokens · ' + played, verdictOf(table.flags[i])),
      el('span', {}, asked && el('span', { class: 'asked', dir: 'auto' }, shortened(questionOf(table, group), 160, 40)), el('span', { class: 'excerpt', dir: 'auto' }, excerpt))));
  }
  return el('div', { class: 'rows' }, made);
}
