// The page, from its data.

function header() {
  const { data } = state;
  const bytes = document.documentElement.outerHTML.length;
  const theme = el('button', { type: 'button', id: 'theme', click: () => {
    const dark = getComputedStyle(document.documentElement).getPropertyValue('color-scheme').trim() === 'dark';
    document.documentElement.dataset.theme = dark ? 'light' : 'dark';
  } }, 'light / dark');
  return el('header', {}, el('h1', {}, data.runs.map((run) => run.name).join(', ')), theme,
    el('p', { class: 'note' }, 'groupwise ' + data.version + ', written ' + data.made + ', ' + (bytes / 2 ** 20).toFixed(1) + ' MiB'));
}

function navigation(sections) {
  return el('nav', { 'aria-label': 'Sections' }, sections.map((one) => el('a', { href: '#' + one.id }, one.querySelector('h2').textContent)));
}

function start() {
  state.data = JSON.parse(document.getElementById('data').textContent);
  const sections = [overviewSection, findingsSection, curvesSection, distributionsSection, evaluationsSection, beforeAfterSection, completionsSection, settingsSection]
    .map((make) => make()).filter((made) => made !== null);
  document.getElementById('page').append(header(), navigation(sections), el('main', {}, sections));
  document.documentElement.dataset.ready = 'true';
}

start();
