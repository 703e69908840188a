// Put the page together.

function drawHead() {
  byId('title').textContent = data.title;
  const parts = [data.task && `task ${data.task}`, `network ${data.network.model}`, `precisions ${data.choices.map((choice) => choice.name).join(', ')}`, `cost ${data.cost.name}`];
  byId('subtitle').textContent = parts.filter(Boolean).join(' · ');
}

/** The reader's system decides, until the button is used. */
function followTheme() {
  const dark = matchMedia('(prefers-color-scheme: dark)');
  const root = document.documentElement;
  const set = (name) => { root.dataset.theme = name; };
  set(dark.matches ? 'dark' : 'light');
  dark.addEventListener('change', () => set(dark.matches ? 'dark' : 'light'));
  byId('theme').addEventListener('click', () => set(root.dataset.theme === 'dark' ? 'light' : 'dark'));
}

followTheme();
drawHead();
drawAnswer();
drawFrontier();
drawLayers();
drawAdditivity();
drawEstimates();
drawTrials();
drawProvenance();
document.addEventListener('keydown', (event) => { if (event.key === 'Escape' && view.selected) closeDetail(); });
document.documentElement.dataset.ready = 'yes';
