"""The page at "/": its files and headers, and its use by keyboard in a headless browser."""

from __future__ import annotations

import datetime
import itertools
import json
import re
import shutil
import time
from importlib import resources

import httpx
import pytest
from waiting import wait_until

from plait.runtime.server.http.api_keys import digest
from plait.runtime.server.http.static_page import PAGE_FILES

PAGE_FOLDER = resources.files("plait.runtime.server") / "page"
# 2026-11-21: browsers are not on PyPI; CI installs one, a laptop may have none
NO_BROWSER = f"no chromium and chromedriver here ({datetime.date.today()}); CI installs both"

# Records the text of the first answer after every change of the page.
RECORD_TEXTS = """
window.recordedTexts = [];
new MutationObserver(() => {
  const text = document.querySelector(".assistant .text");
  if (text && text.textContent) window.recordedTexts.push(text.textContent);
}).observe(document.getElementById("thread"), { childList: true, subtree: true, characterData: true });
"""


@pytest.mark.parametrize("path", PAGE_FILES)
def test_files_have_a_content_security_policy(serve, path) -> None:
    address, _ = serve(api_keys={"a": digest(b"a")})
    answer = httpx.get(address + path, timeout=60)
    assert answer.status_code == 200 and answer.content == (PAGE_FOLDER / PAGE_FILES[path]).read_bytes()
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'" and policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = httpx.get(address + path, headers={"if-none-match": answer.headers["etag"]}, timeout=60)
    assert again.status_code == 304 and again.content == b""
    assert httpx.post(address + path, headers={"x-api-key": "a"}, timeout=60).status_code == 405


@pytest.mark.parametrize("name", PAGE_FILES.values())
def test_files_use_no_outside_address_and_insert_no_markup(name) -> None:
    text = (PAGE_FOLDER / name).read_text().replace('"http://www.w3.org/2000/svg"', "")  # the name of SVG, no address
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", text)
    assert not re.search(r"<script(?! type=\"module\" src=)|\son[a-z]+=|style=", text)


def test_referenced_files_and_ids_exist() -> None:
    html = (PAGE_FOLDER / "index.html").read_text()
    for path in re.findall(r'(?:src|href)="([^"]+)"', html):
        assert path in PAGE_FILES
    ids = re.findall(r'\sid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for name in PAGE_FILES.values():
        if name.endswith(".js"):
            source = (PAGE_FOLDER / name).read_text()
            assert set(re.findall(r'byId\("([^"]+)"\)', source)) <= set(ids), name
            for other in re.findall(r'from "\./([^"]+)"', source):
                assert other in PAGE_FILES.values()
    for target in re.findall(r'(?:for|aria-controls|aria-labelledby)="([^"]+)"', html):
        assert target in ids


@pytest.fixture
def browser():
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip(NO_BROWSER)
    webdriver = pytest.importorskip("selenium.webdriver", reason=NO_BROWSER)
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


class PageUser:
    """Uses the page in a browser."""

    def __init__(self, browser) -> None:
        self.browser = browser

    def at(self, name):
        return self.browser.find_element("id", name)

    def press(self, *keys) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    def ask(self, text) -> None:
        self.at("message").send_keys(text, "\n")

    def click_text(self, text) -> None:
        buttons = self.browser.find_elements("css selector", "button")
        next(button for button in buttons if button.text == text).click()

    def texts(self, selector) -> list[str]:
        """The texts of all elements that a selector finds."""
        script = "return [...document.querySelectorAll(arguments[0])].map((element) => element.textContent.trim())"
        return self.browser.execute_script(script, selector)

    def set_value(self, name, value) -> None:
        self.browser.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, value)

    def set_options(self, options) -> None:
        for name, value in options.items():
            self.set_value(name, value)

    def selected_text(self, name) -> str:
        script = "const box = document.getElementById(arguments[0]);"
        script += "return box.value.slice(box.selectionStart, box.selectionEnd)"
        return self.browser.execute_script(script, name)

    def problems(self, *expected) -> list[dict[str, object]]:
        """What the browser's console has, without the statuses that are expected."""
        return [e for e in self.browser.get_log("browser") if not any(status in e["message"] for status in expected)]

    def sees(self, condition) -> bool:
        return wait_until(condition)

    def fits_the_width(self) -> bool:
        wide = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        return self.browser.execute_script(wide)

    def resize(self, width, height) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def test_key_chat_schema_and_live_view_work_by_keyboard(serve, engine, browser, tmp_path, monkeypatch) -> None:
    from selenium.webdriver.common.keys import Keys

    address, state = serve(api_keys={"me": digest(b"my-key")})
    user = PageUser(browser)
    user.resize(1200, 800)
    browser.get(address)
    assert user.sees(lambda: user.at("keybar").is_displayed())
    assert user.sees(lambda: browser.switch_to.active_element.get_attribute("id") == "key")
    user.press("my-key", Keys.ENTER)
    assert user.sees(lambda: user.at("state").get_attribute("data-state") == "good")
    assert user.at("model").text == "SmolLM2-135M-Instruct.Q4_1" and not user.at("keybar").is_displayed()

    user.set_options({"max-tokens": "40", "temperature": "0"})
    browser.execute_script(RECORD_TEXTS)
    user.at("message").send_keys("<b>What is</b> the capital of France?", Keys.ENTER)
    assert user.sees(lambda: "tokens in" in browser.find_elements("css selector", ".assistant .stats")[0].text)
    texts = browser.execute_script("return window.recordedTexts")
    assert texts and texts[-1] == browser.execute_script(
        "return document.querySelector('.assistant .text').textContent"
    )
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts)), "pieces came out of order"
    assert browser.find_element("css selector", ".user .text").text == "<b>What is</b> the capital of France?"
    assert not browser.find_elements("css selector", ".thread b")

    runner = engine.engine_loop.model_runner
    forward = runner.forward
    # Ten tokens per second, so that the story does not end before the live view has shown it.
    monkeypatch.setattr(runner, "forward", lambda batch: (time.sleep(0.1), forward(batch))[1])
    user.set_options({"max-tokens": "4000"})
    user.at("message").send_keys("Tell me a very long story.", Keys.ENTER)
    assert user.sees(lambda: state.in_flight.num_admitted == 1)
    user.at("tab-chat").send_keys(Keys.ARROW_LEFT)  # wraps around to the last tab
    assert user.sees(lambda: user.at("running").text == "1" and user.at("rate").text != "0")
    assert browser.find_element("css selector", "#requests td").text.startswith("req-")
    user.press(Keys.ESCAPE)
    assert user.sees(lambda: state.in_flight.num_admitted == 0)
    assert user.sees(lambda: user.at("none").is_displayed())
    monkeypatch.setattr(runner, "forward", forward)

    user.at("tab-live").send_keys(Keys.ARROW_LEFT)
    user.press(Keys.ARROW_LEFT)
    user.at("schema-prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    assert user.sees(lambda: user.at("verdict").text == "fits the schema")
    value = json.loads(user.at("output").text)
    assert set(value) == {"name", "age", "languages"} and 0 <= value["age"] <= 130
    fields = user.texts("#fields > dl > div > dd > span")
    assert fields == [value["name"].strip(), str(value["age"])]
    assert user.texts("#fields dd dd") == value["languages"]
    schema = user.at("schema-text").get_attribute("value")
    user.set_value("schema-text", schema.replace('"integer"', '"whole"'))
    user.at("schema-run").click()
    assert user.sees(lambda: user.at("verdict").text == "refused")
    assert user.selected_text("schema-text") == '"whole"'
    assert "/properties/age/type" in user.at("schema-problem").text
    user.set_value("schema-text", schema + "}")
    user.at("schema-run").click()
    assert user.sees(lambda: user.at("verdict").text == "the schema is not JSON")
    assert user.selected_text("schema-text") == "}"

    for width in (1200, 390, 320):
        user.resize(width, 800)
        for tab in ("tab-chat", "tab-schema", "tab-program", "tab-live"):
            user.at(tab).click()
            assert user.fits_the_width(), (tab, width)
            browser.save_screenshot(str(tmp_path / f"{tab}-{width}.png"))
    assert user.problems("401", "400") == []


TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}}}


def test_conversations_and_tools_are_kept_until_they_are_deleted(serve, browser) -> None:
    address, _ = serve()
    user = PageUser(browser)
    user.resize(1200, 800)
    browser.get(address)
    user.set_options({"tools": json.dumps([TOOL]), "tool-choice": "required", "max-tokens": "60", "temperature": "0"})
    user.ask("What is the weather in Paris?")
    assert user.sees(lambda: user.texts(".call strong") == ["weather"] and user.texts(".results button"))
    browser.refresh()
    assert user.sees(lambda: user.texts(".results button"))
    assert user.at("tools").get_attribute("value") == json.dumps([TOOL])
    browser.find_element("css selector", ".call textarea").send_keys("<i>It rains.</i>")
    user.set_options({"tool-choice": "none"})
    browser.find_element("css selector", ".results button").click()
    assert user.sees(lambda: len(user.texts(".assistant:not(.running) .stats:not(:empty)")) == 2)
    assert user.texts(".tool .text") == ["<i>It rains.</i>"]
    assert not browser.find_elements("css selector", ".call textarea, .results button, .thread i")

    answers = user.texts(".assistant .text")
    user.click_text("Try again")
    assert browser.switch_to.active_element.get_attribute("id") == "message"
    assert user.sees(lambda: len(user.texts(".assistant:not(.running) .stats:not(:empty)")) == 2)
    assert user.texts(".assistant .text") == answers  # temperature 0: the same conversation was sent again

    user.at("clear").click()
    assert user.sees(lambda: user.at("empty").is_displayed())
    user.ask("Say hello.")
    assert user.sees(lambda: user.texts(".assistant:not(.running) .stats:not(:empty)"))
    assert user.texts("#conversations button") == ["Say hello.", "What is the weather in Paris?"]
    user.click_text("What is the weather in Paris?")
    assert user.texts(".assistant .text") == answers
    user.at("delete").click()
    browser.switch_to.alert.dismiss()
    assert len(user.texts("#conversations button")) == 2
    kept = "return Object.keys(localStorage).filter((key) => key.startsWith('plait-conversation-')).length"
    assert browser.execute_script(kept) == 2
    user.at("keep").click()
    assert browser.execute_script(kept) == 0
    browser.refresh()
    assert user.sees(lambda: user.texts("#conversations button") == ["New conversation"])
    assert user.problems() == []


def test_a_program_shows_its_calls_and_an_error_its_node(serve, browser) -> None:
    from selenium.webdriver.common.keys import Keys

    address, _ = serve()
    user = PageUser(browser)
    user.resize(1200, 800)
    browser.get(f"{address}/#program")
    user.at("program-text").send_keys(Keys.CONTROL, Keys.ENTER)
    assert user.sees(lambda: user.at("program-state").text == "done")
    assert user.texts(".tree .call.done strong") == ["advice", "tip", "tip", "tip", "best"]
    assert len(user.texts(".tree .branch")) == 3
    assert user.at("program-stats").text.startswith("5 of 5 calls")
    assert all("prompt tokens cached" in text for text in user.texts(".tree .call .stats"))

    body = {"program": [{"text": "a"}, {"gen": {"name": "b", "regx": "c"}}]}
    user.set_value("program-text", json.dumps(body))
    user.at("program-run").click()
    assert user.sees(lambda: user.at("program-state").text == "failed")
    assert "did you mean 'regex'" in user.at("program-problem").text
    assert user.selected_text("program-text") == '"c"'
    assert user.texts(".tree .call.failed strong") == ["b"]
    assert user.problems("400") == []
