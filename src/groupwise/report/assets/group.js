// One group in full: its scores, how they became advantages, and what each token has of them.

const SHORT_PROMPT = 800;

async function showGroup(place, table, row) {
  const number_ = table.group[row], first = table.firstRow[number_];
  const group = await groupAt(table, number_);
  const run = atStep(state.data.runs[table.index], group.step);
  const rows = group.rows.map((one, i) => ({
    ...one, i: first + i, reward: table.reward[first + i], advantage: table.advantage[first + i], tokens: table.tokens[first + i], flags: table.flags[first + i], sample: table.sample[first + i],
  }));
  const chosen = rows[row - first];
  const times = await overSteps(place, table, row);
  remember('completion', table.index, group.step, group.problem, chosen.sample);
  replaceChildren(place,
    el('h3', { tabindex: -1 }, (state.data.runs.length > 1 ? run.name + ', step ' : 'Step ') + group.step + ', problem ' + group.problem, anchor(['completion', table.index, group.step, group.problem, chosen.sample], 'this completion')),
    el('p', { class: 'question', dir: 'auto' }, questionOf(table, group)),
    el('details', { open: group.prompt.length <= SHORT_PROMPT }, el('summary', {}, 'Prompt'), el('pre', {}, group.prompt)), el('p', {}, 'Expected: ', el('code', {}, group.expected)),
    scoresTable(run, table.components, rows, (i) => showGroup(place, table, i), row),
    howAdvantages(run, rows), times,
    el('h4', {}, 'Sample ' + chosen.sample), chosen.u ? turnsOf(chosen, run.advantage) : chosen.n ? tokensOf(chosen, run.advantage) : el('pre', {}, chosen.t),
    againstAnother(rows, chosen));
  place.scrollIntoView({ block: 'nearest' });
  place.querySelector('h3').focus({ preventScroll: true });  // whoever came by keyboard goes on from here
}

// The run with the completions of this step in its rule: those of groups that could not be scored are left out of the loss.
function atStep(run, step) {
  const rule = run.advantage;
  return rule ? { ...run, advantage: { ...rule, completions: rule.completions - (rule.left_out[step] || 0) } } : run;
}

function scoresTable(run, components, rows, open, row) {
  const weight = (name) => (run.weights[name] === undefined ? 1 : run.weights[name]);
  const played = rows.some((one) => one.u);
  const head = ['sample', ...components.map((name) => name + (weight(name) === 1 ? '' : ' × ' + number(weight(name)))), 'reward', 'advantage', '', 'per token', 'tokens', ...(played ? ['turns', 'calls'] : []), 'answer'];
  const largest = Math.max(1e-9, ...rows.map((one) => Math.abs(one.advantage)).filter((a) => !Number.isNaN(a)));
  return table(head, rows.map((one) => [
    el('button', { type: 'button', disabled: one.i === row, click: () => open(one.i) }, String(one.sample)), ...one.c.map(number), number(one.reward), number(one.advantage),
    bar(one.advantage / largest), number(perToken(run.advantage, one)), number(one.tokens), ...(played ? [number((one.u || []).filter(sampledTurn).length), number(callsOf(one).length)] : []), verdictOf(one.flags),
  ]), true);
}

function bar(share) {
  if (Number.isNaN(share)) return null;
  const width = Math.abs(share) * 40;
  return svg('svg', { class: 'bar ' + (share < 0 ? 'below' : 'above'), viewBox: '0 0 80 10', width: 80, height: 10, 'aria-hidden': true },
    svg('rect', { x: share < 0 ? 40 - width : 40, y: 1, width, height: 8 }), svg('line', { x1: 40, x2: 40, y1: 0, y2: 10 }));
}

// Turns of an episode are [role, text, tokens, calls, reward]; a call is [name, arguments, result, failure].
function sampledTurn(turn) {
  return turn[0] === 'assistant';
}

function callsOf(one) {
  return (one.u || []).flatMap((turn) => turn[3]);
}

// Tokens that learn: those that the policy sampled.
function ownTokens(one) {
  return one.u ? one.u.filter(sampledTurn).reduce((sum, turn) => sum + turn[2], 0) : one.tokens;
}

// Whether algorithm.mask_truncated leaves the completion out of the loss.
function leftOut(rule, one) {
  return Boolean(rule && rule.masks && one.flags & TRUNCATED);
}

// A token's part in the loss: advantage times the weight that the aggregation gives it. token_mean needs the whole batch's count.
// With a top_share below 1, the tokens that take part are not recorded.
function perToken(rule, one) {
  if (leftOut(rule, one)) return 0;
  if (!rule || rule.top_share < 1 || Number.isNaN(one.advantage)) return NaN;
  const weights = { sequence_mean: 1 / (ownTokens(one) * rule.completions), fixed: 1 / (rule.completions * rule.max_tokens), sequence_sum: 1 / rule.completions };
  return weights[rule.aggregation] === undefined ? NaN : one.advantage * weights[rule.aggregation];
}

function meanAndDeviation(values) {
  const mean = values.reduce((a, b) => a + b, 0) / values.length;
  const deviation = Math.sqrt(values.reduce((a, b) => a + (b - mean) ** 2, 0) / Math.max(1, values.length - 1));
  return [mean, deviation];
}

function howAdvantages(run, rows) {
  const rule = run.advantage, rewards = rows.map((one) => one.reward);
  if (!rule || rewards.some(Number.isNaN)) return null;
  const [mean, deviation] = meanAndDeviation(rewards);
  const baselines = { group_mean: 'the group’s mean, ' + number(mean), leave_one_out: 'the mean of the others in the group', batch_mean: 'the mean of the whole batch', none: 'nothing' };
  const scales = { group_std: ', divided by the group’s standard deviation, ' + number(deviation) + ' + ' + number(rule.epsilon), batch_std: ', divided by the standard deviation of the whole batch', centred_std: ', divided by the standard deviation of these differences over the whole batch', none: '' };
  const others = { gae: 'by a learned value (GAE)', maxrl: 'reward less the group’s mean, divided by that mean', gdpo: 'each component normalised within its group, added, and normalised over the batch' };
  const perTokenWords = { sequence_mean: 'advantage / (tokens × ' + rule.completions + ' completions of the step)', token_mean: 'advantage / all tokens of the step',
    fixed: 'advantage / (' + rule.completions + ' completions × ' + rule.max_tokens + ' tokens)', sequence_sum: 'advantage / ' + rule.completions + ' completions of the step' };
  const whole = !rule.steps && rule.baseline === 'group_mean' && ['group_std', 'none'].includes(rule.scale) && rule.kl_placement !== 'reward' && rule.kl_placement !== 'token_reward';
  const off = whole ? Math.max(...rows.map((one) => Math.abs(one.advantage - (one.reward - mean) / (rule.scale === 'none' ? 1 : deviation + rule.epsilon)))) : NaN;
  const checked = Number.isNaN(off) ? '' : off < 1e-3 ? ' Counted again here: the same.' : ' Counted again here it is off by up to ' + number(off) + '.';
  // What the tokens' own advantages have in them beside the completion's; the table has the mean of each completion's.
  const inThem = [rule.kl_placement === 'token_reward' ? 'the KL still to come' : '', rule.steps ? 'what the steps still to come earned' : ''].filter(Boolean);
  const differ = inThem.length > 0 || rule.type === 'gae' || rows.some((one) => one.ta);
  return el('p', { class: 'note', id: 'how' }, 'Reward: the components times their weights, added (normalised and clipped where the settings say so). Advantage: ' + (rule.baseline ? 'reward less ' + baselines[rule.baseline] + scales[rule.scale] : others[rule.type] || 'by ' + rule.type) +
    (differ ? '. The tokens of a completion have advantages of their own' + (inThem.length ? ', with ' + inThem.join(' and ') + ' in them' : '') + '; the table has their mean; in the loss a token weighs ' : '. Every token of a completion has its advantage; in the loss it weighs ') + perTokenWords[rule.aggregation] + '.' +
    (rule.masks ? ' Completions that did not end by themselves are left out of the loss (algorithm.mask_truncated).' : '') +
    (rule.top_share < 1 ? ' Only ' + number(100 * rule.top_share) + '% of the step’s tokens, those of most entropy, take part in the loss (algorithm.entropy.top_share); which ones is not recorded.' : '') + checked);
}

// Texts and log-probabilities of a completion's tokens, from their lengths and bytes.
function tokensIn(one, rule) {
  const whole = one.w === undefined ? one.t + one.x : one.w, logprobs = bytesOf(one.lp);
  const given = (one.u || []).flatMap((turn) => Array(Math.min(turn[2], one.n.length)).fill(!sampledTurn(turn)));
  let at = 0;
  return one.n.map((length, i) => {
    at += length;
    return { given: Boolean(given[i]), out: leftOut(rule, one), text: whole.slice(at - length, at), logprob: -16 * (logprobs[i] / 255) ** 2, advantage: one.ta ? one.ta[i] : one.advantage };
  });
}

// The completion token by token: colour is what the update does to the token, the note tells probability and advantage.
function tokensOf(one, rule) {
  const tokens = tokensIn(one, rule);
  return el('div', {}, el('pre', { class: 'tokens' }, tokenSpans(tokens)), aboutTokens(rule, one), tokenList(one, tokens, rule));
}

function aboutTokens(rule, one) {
  return el('p', { class: 'note' }, leftOut(rule, one) ? 'Left out of the loss (algorithm.mask_truncated): no token is coloured. The table has their numbers.' : 'Blue is pushed up, red down. The stronger, the further this token can still move: advantage × (1 − p). Point at a token for its numbers; the table has all of them.' + (rule && rule.top_share < 1 ? ' Only those of most entropy take part in the loss; which ones is not recorded.' : ''));
}

function tokenList(one, tokens, rule) {
  return el('details', {}, el('summary', {}, 'Token by token'), lazily(() => tokenTable(one, tokens, rule)));
}

function tokenSpans(tokens) {
  const largest = Math.max(1e-9, ...tokens.filter((token) => !token.given).map((token) => Math.abs(token.advantage)));
  return tokens.map((token) => {
    if (token.given) return el('span', { class: 'token given', title: 'given, not sampled: it does not learn' }, token.text || '·');
    if (token.out) return el('span', { class: 'token given', title: 'sampled, left out of the loss' }, token.text || '·');
    const p = Math.exp(token.logprob);
    const span = el('span', { class: 'token ' + (token.advantage < 0 ? 'below' : 'above'), title: 'p = ' + number(Number(p.toPrecision(3))) + ', log p = ' + number(Number(token.logprob.toPrecision(3))) + ', advantage ' + number(token.advantage) }, token.text || '·');
    span.style.setProperty('--pull', String(Math.round(60 * Math.abs(token.advantage) / largest * (1 - p) + 6) / 100));
    return span;
  });
}

// An episode turn by turn: who speaks, which tokens learn, what was called and what came back.
function turnsOf(one, rule) {
  const tokens = one.n && one.u.reduce((sum, turn) => sum + turn[2], 0) === one.n.length ? tokensIn(one, rule) : null;
  const spans = tokens && tokenSpans(tokens);  // coloured alike in all turns
  let at = 0;
  const blocks = one.u.map((turn) => {
    const [role, text, count, calls, reward, rewritten] = turn, from = at;
    at += count;
    const about = role + ', ' + number(count) + (count === 1 ? ' token' : ' tokens') + (sampledTurn(turn) ? (leftOut(rule, one) ? ': sampled, left out of the loss' : ': sampled, learns') : rewritten ? ': the rewritten history, does not learn' : ': given, does not learn') + (reward === null ? '' : '; reward ' + number(reward));
    return el('div', { class: 'turn ' + (sampledTurn(turn) ? 'own' : 'given') }, el('h5', {}, about),
      el('pre', { class: tokens ? 'tokens' : false }, tokens ? spans.slice(from, at) : text), calls.map(callOf));
  });
  return el('div', { class: 'turns' }, blocks, tokens ? [aboutTokens(rule, one), tokenList(one, tokens, rule)] : null);
}

const FAILURES = { invalid: 'could not be made', raised: 'failed in the tool', timed_out: 'took too long' };

function callOf([name, given, result, failure]) {
  return el('p', { class: 'call' + (failure ? ' error' : '') }, 'called ', el('code', {}, name + '(' + given + ')'), failure ? ', which ' + (FAILURES[failure] || failure) + ': ' : ' and was told ', el('code', {}, shortened(result, 300, 100)));
}

function tokenTable(one, tokens, rule) {
  const weight = perToken(rule, { ...one, advantage: 1 });
  return table(['#', 'token', 'p when sampled', 'log p', 'advantage', 'weight in the loss', 'advantage × weight'], tokens.map((token, i) => token.given ? [String(i + 1), el('code', {}, JSON.stringify(token.text)), 'given', '–', '–', '–', '–'] : [
    String(i + 1), el('code', {}, JSON.stringify(token.text)), percent(Math.exp(token.logprob)), number(Number(token.logprob.toPrecision(3))), number(token.advantage), number(weight), number(token.advantage * weight),
  ]), true);
}

// The same problem at each step that had it: how its group did, and the answer that was paid best.
const MOST_TIMES = 100;

async function overSteps(place, data, row) {
  const all = groupsByProblem(data)[data.problem[row]];
  if (all.length < 2) return null;
  const rows = [];
  for (const g of all.slice(-MOST_TIMES)) {
    const first = data.firstRow[g], group = await groupAt(data, g), members = group.rows.map((_, i) => first + i);
    const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
    const best = members.reduce((a, b) => (data.reward[b] > data.reward[a] ? b : a));
    rows.push([
      el('button', { type: 'button', disabled: g === data.group[row], 'aria-label': 'Step ' + group.step, click: () => showGroup(place, data, first) }, String(group.step)),
      members.filter((i) => data.flags[i] & RIGHT).length + ' of ' + members.length, number(mean(members.map((i) => data.reward[i]))), number(mean(members.map((i) => data.tokens[i]))),
      el('span', { class: 'excerpt', dir: 'auto' }, shortened(group.rows[best - first].t, 140, 70))]);
  }
  return el('details', { id: 'over-steps', open: true }, el('summary', {}, 'This problem over ' + all.length + ' steps' + (all.length > MOST_TIMES ? ', the last ' + MOST_TIMES : '')),
    table(['step', 'right', 'mean reward', 'mean tokens', 'best paid answer'], rows));
}

function againstAnother(rows, chosen) {
  const best = [...rows].filter((one) => one !== chosen).sort((a, b) => b.reward - a.reward)[0];
  if (!best || best.t === chosen.t) return null;
  return el('details', {}, el('summary', {}, 'Beside sample ' + best.sample + ', the best of the others'),
    el('div', { class: 'pair' }, el('div', {}, el('h4', {}, 'Sample ' + chosen.sample), differing(chosen.t, best.t, 'before')), el('div', {}, el('h4', {}, 'Sample ' + best.sample), differing(chosen.t, best.t, 'after'))));
}
