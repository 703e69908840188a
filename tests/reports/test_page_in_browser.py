"""The page in a real browser: Debian's Chromium, headless, driven by selenium."""

import json

import pytest
from report_browser import CHROMIUM, DRIVER
from report_runs import crossed_run, digits_graph, digits_run, large_run
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

import bitplan
from bitplan.core.codes import entropy
from bitplan.core.records import Graph, Layer
from bitplan.reports.contents import lower_histogram
from bitplan.reports.document import report, report_plan

NASTY = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(run, tmp_path_factory):
    """The page of the whole run, and of a plan whose names are hostile."""
    folder = tmp_path_factory.mktemp("pages")
    report(run, folder / "run.html")
    layers = [Layer(name=f"{i}{NASTY}", kind=NASTY, macs=10 + i, weights=10, in_features=256) for i in range(4)]
    graph = Graph(model=NASTY, layers=tuple(layers))
    gains, cost = bitplan.estimate("uniform", None, graph), bitplan.price("bmac", graph)
    plan = bitplan.select(graph, gains, cost, budget="75%")
    report_plan(plan, graph, gains, (cost,), folder / "nasty.html", f"bitplan plan {NASTY}")
    return folder


@pytest.fixture
def view(browser, pages):
    """Open a page at a size and in a colour scheme; afterwards nothing may have gone wrong in it."""

    def show(name="run.html", width=1200, dark=False, path=None):
        browser.get("about:blank")
        for kind in ("browser", "performance"):
            browser.get_log(kind)
        media = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in media.items()]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get((path or pages / name).as_uri())
        WebDriverWait(browser, 10).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, "html[data-ready]"))
        return browser

    yield show
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def one(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def shown(browser, selector):
    """The texts of all elements."""
    return browser.execute_script("return [...document.querySelectorAll(arguments[0])].map(e=>e.textContent)", selector)


def choose(browser, layer):
    """Click on a layer's row, out of the way of the navigation."""
    row = one(browser, f".layer[data-layer='{layer}']")
    browser.execute_script("arguments[0].scrollIntoView({ block: 'center' })", row)
    row.click()


def sections(browser):
    return [part.get_attribute("id") for part in browser.find_elements(By.CSS_SELECTOR, "section:not([hidden])")]


def frame(browser):
    """Wait until what was asked for is drawn."""
    browser.execute_async_script("const d = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(d))")


def bars(browser, side="a"):
    """Layer → the precision that its row shows."""
    script = """return Object.fromEntries([...document.querySelectorAll('.layer')].map((row) =>
      [row.querySelector('.name').firstChild.textContent, row.querySelector(`.${arguments[0]} b`).textContent]))"""
    return browser.execute_script(script, side)


def figure(browser, name):
    return one(browser, f"[data-figure='{name}']").get_attribute("textContent").replace(",", "").rstrip("%×")


def agrees(browser, run, method, side="a"):
    """Hold bars and numbers against the plan that `select` gives at the budget on the page."""
    budget = one(browser, "#budget-shown").text
    plan = bitplan.select(run.graph, run.gains[method], run.costs, budget=budget)
    assert bars(browser, side) == {name: str(precision) for name, precision in plan.precisions.items()}
    assert int(figure(browser, f"cost-{side}")) == plan.limits[0].cost
    assert float(figure(browser, f"gain-{side}")) == pytest.approx(plan.gain, rel=1e-5)
    assert float(figure(browser, f"price-{side}")) == pytest.approx(plan.limits[0].shadow_price, rel=1e-3, abs=1e-9)
    return plan


def test_opens_without_errors_or_requests(view):
    browser = view()
    requests = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [one["params"]["request"]["url"] for one in requests if one["method"] == "Network.requestWillBeSent"]
    assert [url for url in urls if not url.startswith(("file:", "data:", "about:"))] == []
    assert any(url.startswith("file:") for url in urls)  # the log does list what is loaded
    assert sections(browser) == ["answer", "frontier", "layers", "additivity", "estimates", "trials", "provenance"]
    assert "take the plan of eagl" in one(browser, ".verdict").text
    assert "undefined" not in one(browser, "main").text
    assert "NaN" not in one(browser, "main").text.replace("the loss is NaN at step", "")


def test_the_slider_shows_the_plan_of_every_budget(view, run):
    browser = view()
    slider = one(browser, "#budget")
    before = agrees(browser, run, "eagl")
    for keys in ([Keys.ARROW_LEFT] * 3, [Keys.HOME], [Keys.PAGE_UP], [Keys.END], [Keys.ARROW_LEFT]):
        slider.send_keys(*keys)
        frame(browser)
        after = agrees(browser, run, "eagl")
        agrees(browser, run, "uniform", "b")
    assert before.precisions != after.precisions
    for chip in browser.find_elements(By.CSS_SELECTOR, ".chips button"):
        chip.click()
        frame(browser)
        assert one(browser, "#budget-shown").text == chip.text
        agrees(browser, run, "eagl")
        assert slider.get_attribute("aria-valuetext") == chip.text


def test_two_methods_stand_side_by_side_and_differences_are_marked(view, run):
    browser = view()
    Select(one(browser, "#method-a")).select_by_visible_text("first_to_last")
    first = agrees(browser, run, "first_to_last")
    second = agrees(browser, run, "uniform", "b")
    differing = [name for name in first.precisions if first.precisions[name] != second.precisions[name]]
    assert differing
    assert sorted(shown(browser, ".layer.unlike .name")) == sorted(
        text for text in shown(browser, ".layer .name") if any(text.startswith(name) for name in differing)
    )
    assert len(browser.find_elements(By.CSS_SELECTOR, ".strip .diff:not([visibility=hidden])")) == len(differing)
    one(browser, "#differing").click()
    assert len(browser.find_elements(By.CSS_SELECTOR, ".list > li:not([hidden])")) < len(run.graph.groups)
    Select(one(browser, "#method-b")).select_by_visible_text("nothing")
    assert not browser.find_elements(By.CSS_SELECTOR, "[data-figure='cost-b']")
    agrees(browser, run, "first_to_last")


def test_methods_can_be_switched_off_and_significance_follows_the_reference(view):
    browser = view()
    whole = len(browser.find_elements(By.CSS_SELECTOR, "#frontier-chart path"))
    button = one(browser, ".legend button[data-method='2']")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert len(browser.find_elements(By.CSS_SELECTOR, "#frontier-chart path")) < whole
    button.click()
    assert len(browser.find_elements(By.CSS_SELECTOR, "#frontier-chart path")) == whole
    assert "better than uniform" in one(browser, "#marks").text
    assert set("".join(shown(browser, "#frontier-chart .star"))) == {"★", "▽"}
    Select(one(browser, "#reference")).select_by_visible_text("eagl")
    assert set("".join(shown(browser, "#frontier-chart .star"))) == {"▽"}


def test_a_layer_shows_its_weights_and_gains(view, run):
    browser = view()
    choose(browser, 9)
    name = run.graph.layers[9].name
    assert one(browser, "#detail h3").text == name
    one(browser, "#budget").send_keys(Keys.END)
    frame(browser)
    assert one(browser, "#entropy").text == f"{run.gains['eagl'].rows[name][-1]:.3f} bits"
    assert len(browser.find_elements(By.CSS_SELECTOR, "#histogram rect")) == 16
    text = one(browser, "#gains").text
    assert "±" in text  # eagl's interval
    assert all(method in text for method in run.gains)
    linked = next(index for index, layer in enumerate(run.graph.layers) if layer.name == "blocks.1.conv1")
    choose(browser, linked)
    assert "blocks.1.shortcut.0" in one(browser, "#detail").text
    choose(browser, 0)
    assert "fixed: first layer" in one(browser, "#detail").text
    one(browser, "#detail .close").click()
    assert "empty" in one(browser, "#detail").get_attribute("class")


def test_the_histogram_is_that_of_the_precision_on_the_slider(view, run):
    browser = view()
    choose(browser, 9)
    name, counts = run.graph.layers[9].name, run.gains["eagl"].histograms[run.graph.layers[9].name]
    seen = set()
    for keys in ([Keys.HOME], *([Keys.ARROW_RIGHT] * 12 for _ in range(6)), [Keys.END]):
        one(browser, "#budget").send_keys(*keys)
        frame(browser)
        wanted = {side: int(bars(browser, side)[name][1]) for side in "ab"}
        figures = browser.find_elements(By.CSS_SELECTOR, "#histogram, #histogram-1")
        found = [int(drawn.get_attribute("data-bits")) for drawn in figures]
        assert found == list(dict.fromkeys(wanted.values()))
        assert [len(drawn.find_elements(By.TAG_NAME, "rect")) for drawn in figures] == [2**bits for bits in found]
        told = shown(browser, "#entropy, #entropy-1")
        low = f"about {entropy(lower_histogram(counts, 2)):.2f} bits"
        assert told == [{4: f"{entropy(counts):.3f} bits", 2: low}[bits] for bits in found]
        seen |= set(found)
    assert seen == {2, 4}


def test_everything_works_from_the_keyboard(view, run):
    browser = view()
    active = browser.switch_to.active_element
    reached = set()
    for _ in range(60):
        active.send_keys(Keys.TAB)
        active = browser.switch_to.active_element
        reached.add(active.get_attribute("id") or active.get_attribute("class") or active.tag_name)
    assert {"theme", "budget", "method-a", "method-b", "reference", "layer", "trial-filter"} <= reached
    chart = one(browser, "#frontier-chart svg")
    chart.send_keys(Keys.ARROW_RIGHT)
    first = one(browser, "#tip").text
    chart.send_keys(Keys.ARROW_RIGHT)
    assert one(browser, "#tip").text != first
    assert "±" in first
    row = one(browser, ".layer[tabindex='0']")
    row.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert one(browser, "#detail h3").text == run.graph.groups[1].layers[1].name
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not browser.find_elements(By.CSS_SELECTOR, "#detail h3")


@pytest.mark.parametrize("name", ["run.html", "nasty.html"])
def test_nothing_overflows_on_a_phone(view, name):
    browser = view(name, width=360)
    choose(browser, 2)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    detail, row = (one(browser, selector).rect for selector in ("#detail", ".layer[data-layer='2']"))
    assert detail["y"] > row["y"]
    assert detail["width"] <= 340


@pytest.mark.parametrize("name", ["run.html", "nasty.html"])
def test_no_table_and_no_command_is_cut_off_on_a_phone(view, name):
    browser = view(name, width=390)
    browser.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    cut = """return [...document.querySelectorAll('.scroll, .command code')]
             .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"""
    assert browser.execute_script(cut) == []
    named = "return getComputedStyle(document.querySelector('#estimates td:nth-child(2)'), '::before').content"
    assert browser.execute_script(named) == '"options "', "each cell says what its column is"


@pytest.mark.parametrize("width", [360, 390, 1200])
def test_names_of_lines_keep_clear_of_curves_and_of_each_other(view, tmp_path, width):
    path = report(crossed_run(tmp_path / "run"), tmp_path / "page.html")
    browser = view(path=path, width=width)
    assert sorted(shown(browser, "#frontier-chart .over")) == ["all at w2a2 94.00", "all at w4a4 96.00", "float 96.20"]
    met = """
      const all = (what) => [...document.querySelectorAll(`#frontier-chart ${what}`)];
      const boxes = (what) => all(what).map((one) => one.getBoundingClientRect());
      const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
      const names = boxes('.over');
      const others = [...boxes('path[transform]'), ...boxes('.star')];
      const after = (index) => [...names.slice(index + 1), ...others];
      return names.flatMap((one, index) => after(index).filter((other) => meet(one, other))).length"""
    assert browser.execute_script(met) == 0


def test_dark_and_light_follow_the_reader_and_the_button(view):
    def brightness(browser):
        return sum(
            int(part)
            for part in browser.execute_script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g)")
        )

    assert brightness(view(dark=False)) > 600
    browser = view(dark=True)
    assert brightness(browser) < 120
    one(browser, "#theme").click()
    assert brightness(browser) > 600


def test_hostile_names_are_text(view):
    browser = view("nasty.html")
    assert browser.execute_script("return window.hacked") is None
    assert one(browser, "h1").text == NASTY
    assert not browser.find_elements(By.CSS_SELECTOR, "main img")
    assert shown(browser, ".layer .name")[0].startswith(f"0{NASTY}")
    choose(browser, 1)
    assert one(browser, "#detail h3").text == f"1{NASTY}"
    assert "scores" not in one(browser, "nav").text.lower()
    assert "Trials" not in one(browser, "nav").text
    assert "counted the weights" in one(browser, "#detail").text  # no histograms: said in words


def test_trials_can_be_filtered_and_sorted(view):
    browser = view()
    assert one(browser, "#trial-count").text == "71 of 71"
    one(browser, "#trial-filter").send_keys("uniform failed")
    assert one(browser, "#trial-count").text == "1 of 71"
    assert "failed: Diverged: the loss is NaN at step 120" in shown(browser, "#trial-rows td")
    one(browser, "#trial-filter").clear()
    one(browser, "#trial-filter").send_keys("eagl")
    one(browser, "#trials th:nth-child(4) button").click()
    scores = [float(text) for text in shown(browser, "#trial-rows td:nth-child(4)")]
    assert scores == sorted(scores)
    one(browser, "#more-trials").click()
    assert len(browser.find_elements(By.CSS_SELECTOR, "#trial-rows tr")) == 20


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"results": False}, ["No trial is done yet", "There is no score to draw yet"]),
        ({"methods": ("uniform",), "seeds": 1}, ["One seed only", "Only one method", "one method in this run"]),
    ],
)
def test_thin_runs_say_so(view, tmp_path, fields, expected):
    path = report(digits_run(tmp_path / "run", **fields), tmp_path / "page.html")
    text = one(view(path=path), "main").text
    for part in expected:
        assert part in text


def test_in_a_large_run_the_slider_touches_only_what_changes(view, tmp_path):
    folder = large_run(tmp_path / "run", layers=300, budgets=20, seeds=1)
    path = report(folder, tmp_path / "page.html")
    assert path.stat().st_size < 1_000_000
    browser, before = view(path=path), None
    for key in (None, Keys.ARROW_LEFT):
        browser.execute_script(
            """window.touched = new Set(); new MutationObserver((found) => found.forEach((one) => {
               const row = one.target.closest('.layer'); if (row) touched.add(row.dataset.layer); }))
               .observe(document.getElementById('layer-list'), { subtree: true, attributes: true, childList: true })"""
        )
        if key:
            one(browser, "#budget").send_keys(key)
            frame(browser)
            now = [bars(browser, side) for side in "ab"]
            changed = [
                name for name in now[0] if any(old[name] != new[name] for old, new in zip(before, now, strict=True))
            ]
            assert 0 < len(changed) < 250
            assert browser.execute_script("return touched.size") == len(changed)
        before = [bars(browser, side) for side in "ab"]


def test_a_page_without_any_training_is_whole(view, tmp_path):
    model, graph = digits_graph()
    gains = bitplan.estimate("eagl", model, graph, steps="mse")
    cost = bitplan.price("bmac", graph)
    plan = bitplan.select(graph, gains, cost, budget="70%")
    path = report_plan(plan, graph, gains, (cost,), tmp_path / "plan.html", "bitplan plan x")
    browser = view(path=path)
    assert sections(browser) == ["answer", "frontier", "layers", "estimates", "provenance"]
    assert one(browser, "#frontier-title").text == "Gain against budget"
    assert bars(browser) == {name: str(precision) for name, precision in plan.precisions.items()}
    assert all(part.text.strip() for part in browser.find_elements(By.CSS_SELECTOR, "section:not([hidden]) .card"))


def test_a_budget_of_the_whole_network_says_so(view, tmp_path):
    _, graph = digits_graph()
    gains = bitplan.estimate("uniform", None, graph)
    costs = bitplan.price("bmac", graph).model_copy(update={"name": "latency", "unit": "ns"})
    whole = sum(costs.fixed.values()) + sum(row[-1] for row in costs.rows.values())
    asked = f"{0.8 * whole / 1e6:.4f}ms"
    plan = bitplan.select(graph, gains, costs, budget=asked)
    browser = view(path=report_plan(plan, graph, gains, (costs,), tmp_path / "page.html", "bitplan plan"))
    assert f"{asked.rstrip('0')} of latency, whole network" in one(browser, ".verdict").text
    used = (plan.limits[0].cost + plan.limits[0].fixed) / 1e6
    tile = one(browser, ".tiles li").text
    assert float(tile.split("ms")[0]) == pytest.approx(used, rel=1e-3)
    assert "ms of it by fixed layers" in tile
    assert "Budget of latency, whole network, " in one(browser, "#layers-body").text
    assert one(browser, "#budget-shown").text == asked.rstrip("0")
    assert "budget, ms of latency, whole network" in shown(browser, "#frontier-chart text")
