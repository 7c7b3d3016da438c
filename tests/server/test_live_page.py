"""The live page in a real browser without a screen: what it draws, and that it draws it without an error."""

import shutil
import time

import pytest

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.common.exceptions import WebDriverException  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

LONG = {"prompt": "a prompt that ends inside of a block", "max_tokens": 450, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def chromium():
    """Return a browser that all tests of this file share."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    try:
        found = webdriver.Chrome(options=options, service=Service(driver))
    except WebDriverException as error:
        pytest.skip(f"needs a browser that starts: {error.msg}")
    yield found
    found.quit()


class Page:
    """The page of a server, as somebody sees it."""

    def __init__(self, browser):
        self.browser = browser

    def open(self, server):
        self.browser.get(server.url + "/")

    def wait(self, condition, seconds=60):
        return WebDriverWait(self.browser, seconds, poll_frequency=0.05).until(lambda _: condition())

    def count(self, selector):
        return self.browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector)

    def number(self, name):
        """Return one of the numbers at the top, None before there are any."""
        script = "return document.querySelector(`dd[data-name='${arguments[0]}']`)?.textContent"
        return self.browser.execute_script(script, name)

    def text(self, selector):
        return self.browser.execute_script("return document.querySelector(arguments[0])?.textContent", selector)

    def click(self, selector):
        self.browser.execute_script("document.querySelector(arguments[0]).click()", selector)

    def messages(self):
        """Return what the browser wrote to its console since the last time."""
        return [entry["message"] for entry in self.browser.get_log("browser")]


@pytest.fixture
def page(chromium):
    page = Page(chromium)
    yield page
    chromium.get("about:blank")
    page.messages()


@pytest.fixture
def slow_server(start):
    """Return a server of four seats whose steps take long enough to be seen."""
    server = start(max_num_seqs=4)
    server.model.register_forward_pre_hook(lambda module, arguments: time.sleep(0.02))
    return server


def test_map_has_a_cell_for_each_block(page, slow_server):
    page.open(slow_server)
    num_blocks = slow_server.engine.engine.kv_cache.num_blocks - 1  # without the null block
    page.wait(lambda: page.count("#map i") == num_blocks)
    assert page.count("#map i.free") == num_blocks
    assert page.text("#model") == "tiny"
    assert page.messages() == []


def test_map_changes_while_requests_run_and_when_they_end(page, slow_server):
    page.open(slow_server)
    connection = slow_server.open_stream(LONG | {"n": 3})
    # Four full blocks of the prompt are shared by three samples, which then have blocks of their own.
    page.wait(lambda: page.count("#map i.shared") == 4)
    held = page.wait(lambda: page.count("#map i.held"))
    page.wait(lambda: page.count("#map i.held") > held)
    connection.close()
    page.wait(lambda: page.count("#map i.shared") == page.count("#map i.held") == 0)
    assert page.count("#map i.cached") >= 4
    assert page.messages() == []


def test_queue_and_rates_are_shown(page, slow_server):
    page.open(slow_server)
    connections = [slow_server.open_stream(LONG | {"n": 3}) for _ in range(2)]
    page.wait(lambda: (page.number("running"), page.number("waiting")) == ("1", "1"))
    page.wait(lambda: page.number("output tokens/s").isdigit() and page.number("output tokens/s") != "0")
    assert page.count("#requests tr") == 2
    for connection in connections:
        connection.close()
    page.wait(lambda: (page.number("running"), page.number("waiting")) == ("0", "0"))
    page.wait(lambda: page.number("output tokens/s") == "0")
    assert page.messages() == []


def test_blocks_of_a_chosen_request_stand_out(page, slow_server):
    page.open(slow_server)
    connection = slow_server.open_stream(LONG)
    page.wait(lambda: page.count("#requests tr") == 1)
    page.click("#requests tr")
    page.wait(lambda: page.count("#map i.chosen") >= 5)
    assert page.count("#map i.chosen.free") == 0
    connection.close()
    page.wait(lambda: page.count("#map i.chosen") == 0)
    assert page.messages() == []


def test_key_is_asked_for_and_kept(page, start):
    server = start(options={"api_keys": ["one"]})
    page.open(server)
    page.wait(lambda: page.count("#key-form:not([hidden])") == 1)
    assert page.text("#error") == "the server asks for an API key"
    page.browser.execute_script("document.getElementById('key').value = 'one'")
    page.click("#key-form button")
    page.wait(lambda: page.count("#map i") > 0)
    page.open(server)
    page.wait(lambda: page.count("#map i") > 0)
    assert page.count("#key-form[hidden]") == 1
    # The refusal is all that the browser complains of.
    [refusal] = page.messages()
    assert "401" in refusal


def test_page_says_that_the_server_is_gone(page, start):
    server = start()
    page.open(server)
    page.wait(lambda: page.count("#map i") > 0)
    server.stop()
    page.wait(lambda: page.text("#error"))
