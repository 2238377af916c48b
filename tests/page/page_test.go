// Package page opens the page of the admin address in headless Chromium.
package page

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// program builds moeserve once.
var program = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "page")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "moeserve")
	c := exec.Command("go", "build", "-o", path, "./cmd/moeserve")
	c.Dir, c.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if path, err := program(); err == nil {
		os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(code)
}

// node is a server in a process of its own: its API and its admin address.
type node struct{ api, admin string }

var addresses = regexp.MustCompile(`msg="?(serving|admin address)"?.* address=(http://\S+)`)

func serve(t *testing.T, env []string, args ...string) node {
	t.Helper()
	path, err := program()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(path, append([]string{"serve", "--port", "0", "--admin-address", "127.0.0.1:0"}, args...)...)
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "MOESERVE_") { // settings, as it sees them
			c.Env = append(c.Env, v)
		}
	}
	c.Env = append(c.Env, env...)
	log, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Signal(syscall.SIGTERM)
		_, _ = io.Copy(io.Discard, log)
		if err := c.Wait(); err != nil {
			t.Error(err)
		}
	})
	var n node
	for lines := bufio.NewScanner(log); lines.Scan(); {
		if m := addresses.FindStringSubmatch(lines.Text()); m != nil {
			if m[1] == "serving" {
				n.api = m[2]
				go func() { _, _ = io.Copy(io.Discard, log) }()
				return n
			}
			n.admin = m[2]
		}
	}
	t.Fatal("it does not serve")
	return n
}

// browse opens a tab. What it writes to the console as an error, and exceptions, are the test's.
func browse(t *testing.T) context.Context {
	t.Helper()
	path := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if p, err := exec.LookPath(name); err == nil {
			path = p
			break
		}
	}
	if path == "" {
		t.Skip("no Chromium")
	}
	o := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.Flag("hide-scrollbars", true))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewExecAllocator(ctx, o...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	chromedp.ListenTarget(ctx, func(e any) {
		switch e := e.(type) {
		case *runtime.EventExceptionThrown:
			t.Errorf("exception: %s", e.ExceptionDetails.Error())
		case *runtime.EventConsoleAPICalled:
			if e.Type == runtime.APITypeError {
				t.Errorf("console: %s", e.Args[0].Value)
			}
		}
	})
	return ctx
}

func run(t *testing.T, ctx context.Context, actions ...chromedp.Action) {
	t.Helper()
	if err := chromedp.Run(ctx, actions...); err != nil {
		t.Fatal(err)
	}
}

// wait waits until an expression is true.
func wait(expression string) chromedp.Action {
	return chromedp.Poll(expression, nil, chromedp.WithPollingTimeout(time.Minute))
}

// value evaluates an expression.
func value[T any](t *testing.T, ctx context.Context, expression string) (v T) {
	t.Helper()
	run(t, ctx, chromedp.Evaluate(expression, &v, func(p *runtime.EvaluateParams) *runtime.EvaluateParams { return p.WithAwaitPromise(true) }))
	return v
}

// size is that of the window.
func size(width, height int64) chromedp.Action {
	return emulation.SetDeviceMetricsOverride(width, height, 1, false)
}

// shoot saves a picture of the page in the folder that SCREENSHOTS names.
func shoot(t *testing.T, ctx context.Context, name string) {
	t.Helper()
	dir := os.Getenv("SCREENSHOTS")
	if dir == "" {
		return
	}
	var png []byte
	run(t, ctx, chromedp.FullScreenshot(&png, 100))
	if err := os.WriteFile(filepath.Join(dir, name), png, 0o666); err != nil {
		t.Fatal(err)
	}
}

// accessible has axe-core look for violations of WCAG 2 A and AA, where AXE_CORE is its file.
func accessible(t *testing.T, ctx context.Context, where string) {
	t.Helper()
	path := os.Getenv("AXE_CORE")
	if path == "" {
		t.Log("AXE_CORE is not set: axe-core was not run")
		return
	}
	axe, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var found string
	run(t, ctx, chromedp.Evaluate(string(axe)+";0", nil), chromedp.Evaluate(
		`axe.run({runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}).then(r => JSON.stringify(r.violations.map(v => v.id + ": " + v.nodes.slice(0, 3).map(n => n.html.slice(0, 120) + " " + n.failureSummary))))`,
		&found, func(p *runtime.EvaluateParams) *runtime.EvaluateParams { return p.WithAwaitPromise(true) }))
	if found != "[]" {
		t.Errorf("%s: %s", where, found)
	}
}

// load has clients complete prompts until the test ends.
func load(t *testing.T, n node, clients int) {
	t.Helper()
	stop := make(chan struct{})
	var all sync.WaitGroup
	for i := range clients {
		all.Go(func() {
			for j := 0; ; j++ {
				select {
				case <-stop:
					return
				default:
				}
				body := fmt.Sprintf(`{"prompt": "sort: %s =", "max_tokens": 60, "ignore_eos": true, "temperature": 0.7}`, strings.Repeat(string(rune('a'+(i+j)%26))+" ", 5+j%20))
				r, err := http.Post(n.api+"/v1/completions", "application/json", strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.Copy(io.Discard, r.Body)
				_ = r.Body.Close()
			}
		})
	}
	t.Cleanup(func() { close(stop); all.Wait() })
}

// TestPage: the page shows what a node under load does.
func TestPage(t *testing.T) {
	n := serve(t, nil, "--emulate", "gpus=3,hbm=64MiB,pcie=2GB/s,nvlink=8GB/s", "--offload-fraction", "0.6", "--harvest-headroom", "50%", "--max-num-seqs", "8",
		"--kv-transfer-config", `{"kv_connector_extra_config": {"num_cpu_blocks": 200, "num_gpu_blocks": 50}}`, "--num-gpu-blocks-override", "28")
	var residency struct {
		Experts struct {
			Layers []struct {
				Experts []struct{ Tier string }
			}
		}
	}
	r, err := http.Get(n.admin + "/debug/residency")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.NewDecoder(r.Body).Decode(&residency); err != nil {
		t.Fatal(err)
	}
	_ = r.Body.Close()
	layers, experts := len(residency.Experts.Layers), len(residency.Experts.Layers[0].Experts)

	ctx := browse(t)
	run(t, ctx, size(1280, 900), chromedp.Navigate(n.admin+"/"), wait(`document.querySelectorAll("[role=gridcell]").length > 0`))
	if cells := value[int](t, ctx, `document.querySelectorAll("[role=gridcell]").length`); cells != layers*experts {
		t.Errorf("%d cells for %d experts of %d layers", cells, experts, layers)
	}
	for row, l := range residency.Experts.Layers { // before anything has moved
		for column, e := range l.Experts {
			cell := fmt.Sprintf(`document.querySelector("[data-row='%d'][data-column='%d']")`, row, column)
			if row+column == 0 && value[string](t, ctx, cell+".dataset.tier") != e.Tier {
				t.Errorf("the cell of expert %d of row %d is not of tier %s", column, row, e.Tier)
			}
		}
	}

	// A prompt on the idle node: each token but the first with the experts of every layer.
	run(t, ctx, chromedp.Click("#prompt button"), wait(`/tokens$/.test(document.querySelector("#prompt-state").textContent)`))
	tokens := value[[]string](t, ctx, `[...document.querySelectorAll("#tokens tbody tr")].map(r => r.cells[1].textContent)`)
	for i, used := range tokens {
		if i > 0 && strings.Count(used, ": ") != layers {
			t.Errorf("token %d: the experts of %d layers: %q", i, layers, used)
		}
	}
	if len(tokens) < 2 {
		t.Errorf("%d tokens", len(tokens))
	}

	load(t, n, 12) // more than run at a time, with more tokens than the KV cache has
	run(t, ctx, wait(`document.querySelectorAll("#steps g").length === 100`), wait(`document.querySelector("#state").textContent === "Running"`),
		wait(`parseFloat(document.querySelector("#now dd").textContent.replace(/,/g, "")) > 0`), wait(`document.querySelectorAll("#peers path").length >= 4`))
	if rows := value[int](t, ctx, `document.querySelectorAll("#steps-table tbody tr").length`); rows < 40 {
		t.Errorf("%d rows of steps", rows)
	}
	for _, latency := range []string{"TTFT", "TPOT", "ITL"} {
		run(t, ctx, wait(`/^[0-9.]+ \/ [0-9.]+ ms$/.test([...document.querySelectorAll("#now div")].find(d => d.textContent.startsWith("`+latency+`, median / p99")).lastChild.textContent)`))
	}
	// Requests wait for others before their first token.
	if ms := value[[]float64](t, ctx, `["TTFT", "TPOT"].map(l => parseFloat([...document.querySelectorAll("#now div")].find(d => d.textContent.startsWith(l)).lastChild.textContent))`); ms[0] <= ms[1] || ms[1] <= 0 {
		t.Errorf("TTFT and TPOT are %v", ms)
	}
	testLoad(t, ctx, n)
	run(t, ctx, wait(`document.querySelectorAll("#grid [data-fetched]").length > 0`))
	if said := value[string](t, ctx, `document.querySelector("#device").textContent`); said != "CPU, emulated GPU" {
		t.Errorf("the device is %q", said)
	}
	if said := value[string](t, ctx, `document.querySelector("#bound").textContent`); !regexp.MustCompile(`^(Of these steps \d+ (are|is) bound by |All of these steps are bound by )`).MatchString(said) {
		t.Errorf("of the steps it says %q", said)
	}
	if said := value[string](t, ctx, `document.querySelector("#compared").textContent`); !regexp.MustCompile(`, [\d,]+ % of the \S+ ms that the planner predicts`).MatchString(said) {
		t.Errorf("of the prediction it says %q", said)
	}
	step := value[string](t, ctx, `document.querySelector("#steps g:last-of-type title").textContent`)
	if !regexp.MustCompile(`^Step [\d,]+: \S+ m?s, \d+ tokens? of \d+ sequences?\nBound by: .+, (busy )?\d+ % of the step\n[\d,]+ % of the predicted \S+ ms$`).MatchString(step) {
		t.Errorf("of the last step it says %q", step)
	}
	row := value[[]string](t, ctx, `[...document.querySelector("#steps-table tbody tr").cells].map(c => c.textContent)`)
	if !regexp.MustCompile(`^[\d,]+ %$`).MatchString(row[5]) || !strings.HasSuffix(row[6], " %") {
		t.Errorf("the table of steps has %q", row)
	}
	// Links from peers copy experts: the bar's label has the bytes of each purpose, in the order of its parts.
	run(t, ctx, wait(`document.querySelectorAll("#links .split i[data-purpose=demand]").length > 1`))
	split := value[[]string](t, ctx, `(() => { const s = [...document.querySelectorAll("#links tbody tr")].find(r => r.cells[0].textContent.endsWith("→ gpu0") && r.querySelector("[data-purpose=demand]")).querySelector(".split");
		return [s.querySelector("[role=img]").getAttribute("aria-label"), s.querySelector("p").textContent, s.querySelector(".bar").firstChild.dataset.purpose] })()`)
	if !regexp.MustCompile(`^demand <?\d+ % \([\d.]+ \w+\)`).MatchString(split[0]) || !strings.HasPrefix(split[1], "demand ") || split[2] != "demand" {
		t.Errorf("of what a link copied for it says %q", split)
	}
	testTimeline(t, ctx, n)
	testPurposes(t, ctx)
	testViews(t, ctx)
	parts := value[[]string](t, ctx, `[...document.querySelectorAll("#memory .part")].map(p => p.textContent)`)
	for _, part := range []string{"resident experts", "KV cache", "offloaded experts"} {
		if !slices.Contains(parts, part) {
			t.Errorf("memory has no %s: %v", part, parts)
		}
	}
	// Quantiles are those of PromQL's histogram_quantile, of what has been counted since the histogram before.
	if q := value[[]float64](t, ctx, `(async () => { const {quantile} = await import("/page/views.js"); const h = [[1, 2], [2, 6], [4, 10], [Infinity, 12]];
		return [quantile(h, [], 0.5), quantile(h, [[1, 2], [2, 6], [4, 6], [Infinity, 6]], 0.5), quantile(h, [], 0.99), quantile(h, h, 0.5) ?? -1] })()`); !slices.Equal(q, []float64{2, 3.5, 4, -1}) {
		t.Errorf("quantiles are %v", q)
	}
	for id, least := range map[string]int{"links": 2, "kv": 3, "memory": 4} {
		if rows := value[int](t, ctx, fmt.Sprintf(`document.querySelectorAll("#%s tbody tr").length`, id)); rows < least {
			t.Errorf("%d rows of %s", rows, id)
		}
	}

	// Arrow keys move between experts, of which one is in the order of tabs.
	at := `[document.activeElement.dataset.row, document.activeElement.dataset.column].join()`
	run(t, ctx, chromedp.Evaluate(`document.querySelector("[role=gridcell][tabindex='0']").focus()`, nil))
	for _, k := range []struct{ key, want string }{
		{kb.ArrowRight, "0,1"}, {kb.ArrowDown, "1,1"}, {kb.ArrowLeft, "1,0"}, {kb.ArrowLeft, "1,0"}, {kb.End, fmt.Sprint("1,", experts-1)}, {kb.ArrowUp, fmt.Sprint("0,", experts-1)}, {kb.Home, "0,0"},
	} {
		run(t, ctx, chromedp.KeyEvent(k.key))
		if got := value[string](t, ctx, at); got != k.want {
			t.Errorf("the focus is at %s, want %s", got, k.want)
		}
	}
	if n := value[int](t, ctx, `document.querySelectorAll("[role=gridcell][tabindex='0']").length`); n != 1 {
		t.Errorf("%d cells are in the order of tabs", n)
	}
	// The label of a cell says how much its expert is used, as its shade does.
	use := regexp.MustCompile(`^Layer 0, expert 0: \w+( on \w+)?\. In the last \d+ s [\d,]+ tokens?( \([\d.]+ times the layer's mean\))?, [\d,]+ fetch(es)?(, [\d,]+ prefetch(es)? not used)?(, hit rate [\d.]+ %)?\.`)
	label := value[string](t, ctx, `document.activeElement.getAttribute("aria-label")`)
	if said := value[string](t, ctx, `document.querySelector("#expert").textContent`); !use.MatchString(said) || !use.MatchString(label) || !regexp.MustCompile(`Since the start: used by [\d,]+ steps for [\d,]+ tokens, fetched [\d,]+ times, hit rate [\d.]+ %\. [\d,]+ prefetch(es were| was) not used before`).MatchString(said) {
		t.Errorf("of the expert it says %q, and its label %q", said, label)
	}
	if title := value[string](t, ctx, `(() => { const c = document.querySelector("[data-row='1'][data-column='2']"); c.dispatchEvent(new PointerEvent("pointerover", {bubbles: true})); return c.title })()`); !strings.HasPrefix(title, "Layer 1, expert 2: ") {
		t.Errorf("under the pointer an expert is %q", title)
	}
	if colors := value[int](t, ctx, `new Set([...document.querySelectorAll("#shades-legend i")].map(i => getComputedStyle(i).backgroundColor)).size`); colors != 4 {
		t.Errorf("the 4 shades have %d colors", colors)
	}

	// Pictures have half a minute of load.
	if os.Getenv("SCREENSHOTS") != "" {
		run(t, ctx, wait(`parseInt(document.querySelector("#load-span").textContent.match(/\d+/)[0]) >= 30`))
	}
	open := func(open bool) chromedp.Action {
		return chromedp.Evaluate(fmt.Sprintf(`document.querySelectorAll("details").forEach(d => d.open = %v)`, open), nil)
	}
	for _, theme := range []string{"light", "dark"} {
		run(t, ctx, chromedp.Evaluate(`document.activeElement.blur(); document.documentElement.dataset.theme !== "`+theme+`" && document.querySelector("#theme").click()`, nil))
		ground := value[string](t, ctx, `getComputedStyle(document.body).backgroundColor`)
		if want := map[string]string{"light": "rgb(245, 246, 248)", "dark": "rgb(17, 21, 28)"}[theme]; ground != want {
			t.Errorf("%s: the ground is %s, want %s", theme, ground, want)
		}
		run(t, ctx, open(true))
		accessible(t, ctx, theme)
		run(t, ctx, open(false))
		shoot(t, ctx, "admin-page-"+theme+".png")
	}
	run(t, ctx, size(400, 800), open(true))
	if wide := value[int](t, ctx, `document.documentElement.scrollWidth`); wide > 400 {
		t.Errorf("the page is %d pixels wide in a window of 400", wide)
	}
	shoot(t, ctx, "admin-page-narrow.png")
}

// counted is the sum of a counter in /metrics.
func counted(t *testing.T, n node, name string) (sum float64) {
	t.Helper()
	r, err := http.Get(n.admin + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Body.Close()
	found := regexp.MustCompile(`(?m)^`+name+`(?:\{.*\})? (\S+)$`).FindAllStringSubmatch(string(text), -1)
	if len(found) == 0 {
		t.Fatalf("there is no %s", name)
	}
	for _, f := range found {
		v, err := strconv.ParseFloat(f[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += v
	}
	return sum
}

// testLoad: what is shown of the load over time is what the node counts.
func testLoad(t *testing.T, ctx context.Context, n node) {
	t.Helper()
	panel := func(i int) string { return fmt.Sprintf(`document.querySelectorAll("#load figure")[%d]`, i) }
	said := func(i int) string {
		return value[string](t, ctx, panel(i)+`.querySelector("figcaption span").textContent`)
	}
	run(t, ctx, wait(`/^[4-8] running [4-8] waiting/.test(`+panel(0)+`.querySelector("figcaption span").textContent)`), wait(panel(0)+`.querySelector("path[data-load=waiting]").getBBox().height > `+panel(0)+`.querySelector("path[data-load=running]").getBBox().height`))
	if got := said(1); !regexp.MustCompile(`^[1-9]\d* of 448 tokens $`).MatchString(got) {
		t.Errorf("of the KV cache it says %q", got)
	}
	if got := value[[]string](t, ctx, `[...document.querySelector("#kv tbody tr").cells].map(c => c.textContent)`); got[3] != "448" || got[5] != "28" {
		t.Errorf("of the KV cache the table has %q", got)
	}
	if got := value[string](t, ctx, `[...document.querySelectorAll("#now div")].find(d => d.textContent.startsWith("KV cache tokens")).lastChild.textContent`); !regexp.MustCompile(`^[1-9]\d* of 448$`).MatchString(got) {
		t.Errorf("of the KV cache the header says %q", got)
	}

	// The longest numbers that the axis may have, of other nodes, have room beside it.
	for _, label := range []string{"99,999", "999.9M"} {
		left := value[float64](t, ctx, fmt.Sprintf(`(() => { const l = %s.querySelector("svg text"); l.textContent = %q; return l.getBBox().x })()`, panel(1), label))
		if left < 0 {
			t.Errorf("%s at the axis of the KV cache begins at %v, left of the chart", label, left)
		}
	}

	// All borrowed memory of a peer is asked for.
	r, err := http.Post(n.admin+"/harvest/reclaim", "application/json", strings.NewReader(`{"device": 1, "bytes": 67108864}`))
	if err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Body.Close()
	for i, name := range map[int]string{2: "vllm:num_preemptions_total", 3: "moeserve_harvest_revocations_total"} {
		least := counted(t, n, name)
		if least == 0 {
			t.Errorf("%s is 0; the answer of reclaim was %s", name, answer)
			continue
		}
		// The number of the last minute, which is that of the page's life, and that since the start.
		shown := fmt.Sprintf(`%s.querySelector("figcaption span").textContent.match(/^([\d,]+) in this time.* ([\d,]+) since the start$/).slice(1).map(n => Number(n.replace(",", "")))`, panel(i))
		run(t, ctx, wait(fmt.Sprintf(`%s[1] >= %v`, shown, least)))
		got := value[[]float64](t, ctx, shown)
		if most := counted(t, n, name); got[1] > most || got[0] == 0 || got[0] > got[1] {
			t.Errorf("%s: it says %v, and the node %v to %v", name, got, least, most)
		}
		if high := value[float64](t, ctx, panel(i)+`.querySelector("path").getBBox().height`); high < 70 {
			t.Errorf("%s: the highest bar is %v high", name, high)
		}
	}
	if got := said(3); !regexp.MustCompile(`^\d+ in this time \(.*external \d+.*\), `).MatchString(got) {
		t.Errorf("of revocations it says %q", got)
	}
	// The table has the same: its sums are those of the charts.
	sums := value[[]float64](t, ctx, `[4, 5].map(i => [...document.querySelectorAll("#load-table tbody tr")].flatMap(r => r.cells[i].textContent.replace(/,/g, "").match(/\d+/g).map(Number)).reduce((a, b) => a + b)).concat([2, 3].map(i =>
		Number(document.querySelectorAll("#load figure")[i].querySelector("figcaption span").textContent.replace(/,/g, "").match(/^\d+/)[0])))`)
	if sums[0] != sums[2] || sums[1] != sums[3] {
		t.Errorf("preemptions and revocations of the table, and those of the charts: %v", sums)
	}
	for i := range 4 {
		if label := value[string](t, ctx, panel(i)+`.querySelector("svg").getAttribute("aria-label")`); !regexp.MustCompile(`^(Sequences|KV cache|Preemptions per 10 s|Revocations of peer memory per 10 s): .*\d.*\. The table below`).MatchString(label) {
			t.Errorf("a chart's label is %q", label)
		}
	}
}

// testTimeline: the lanes of steps are those of the events, and the table has the same.
func testTimeline(t *testing.T, ctx context.Context, n node) {
	t.Helper()
	run(t, ctx, wait(`document.querySelectorAll("#timeline path[data-lane=GPU]").length > 0 && document.querySelectorAll("#timeline path[data-for=demand]").length > 0`))
	type span struct {
		For  string
		From int64 `json:"from_ns"`
		To   int64 `json:"to_ns"`
	}
	type step struct {
		Step     int64
		Timeline *struct {
			Duration int64 `json:"duration_ns"`
			Stalls   []span
		}
	}
	all := map[int64]step{}
	var rows [][]string // of the table
	var drawn int       // steps of the chart at that moment
	look := func() {
		rows = value[[][]string](t, ctx, `[...document.querySelectorAll("#timeline-table tbody tr")].map(r => [...r.cells].map(c => c.textContent)).concat([[String(document.querySelectorAll("#timeline g").length)]])`)
		last := len(rows) - 1
		var err error
		if drawn, err = strconv.Atoi(rows[last][0]); err != nil {
			t.Fatal(err)
		}
		rows = rows[:last]
	}
	stepOf := func(row []string) int64 {
		n, err := strconv.ParseInt(strings.ReplaceAll(row[0], ",", ""), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	both := func() (n int) {
		for _, row := range rows {
			if _, ok := all[stepOf(row)]; ok {
				n++
			}
		}
		return n
	}
	follow, stop := context.WithTimeout(ctx, 30*time.Second)
	defer stop()
	q, err := http.NewRequestWithContext(follow, http.MethodGet, n.admin+"/debug/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.DefaultClient.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	lines := bufio.NewScanner(r.Body)
	looked := time.Now()
	// Until the table has two steps that the stream has had, too: 16 of each second have a timeline.
	for lines.Buffer(nil, 1<<20); both() < 2 && lines.Scan(); {
		var s step
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok && json.Unmarshal([]byte(data), &s) == nil && s.Timeline != nil {
			all[s.Step] = s
		}
		if time.Since(looked) > 200*time.Millisecond {
			look()
			looked = time.Now()
		}
	}
	if len(rows) < 2 || len(rows) > 16 || drawn != len(rows) {
		t.Errorf("the table has %d steps, and the chart %d", len(rows), drawn)
	}
	compared := 0
	for _, row := range rows {
		number := stepOf(row)
		s, ok := all[number]
		if !ok {
			continue
		}
		compared++
		waited := int64(0)
		for _, w := range s.Timeline.Stalls {
			waited += w.To - w.From
		}
		ms, err := strconv.ParseFloat(strings.ReplaceAll(row[1], ",", ""), 64)
		if d := ms - float64(s.Timeline.Duration)/1e6; err != nil || d < -0.01 || d > 0.01 {
			t.Errorf("step %d took %d ns, and the page says %s ms", number, s.Timeline.Duration, row[1])
		}
		computing := regexp.MustCompile(`computing (\d+) %`).FindStringSubmatch(row[2])
		if share := 1 - float64(waited)/float64(s.Timeline.Duration); share > 0.01 {
			if computing == nil {
				t.Errorf("step %d computed for %.3f of its time, and the page says %q", number, share, row[2])
			} else if p, _ := strconv.ParseFloat(computing[1], 64); p-100*share > 0.51 || p-100*share < -0.51 {
				t.Errorf("step %d computed for %.3f of its time, and the page says %q", number, share, row[2])
			}
		}
	}
	if compared == 0 {
		t.Errorf("of the steps on the page, %v, the stream had none of %d", rows, len(all))
	}
	label := regexp.MustCompile(`^\d+ consecutive steps in \S+ m?s\. GPU: .*\d %.*; \w+ → \w+: .*\d %.*\. The table below has each step\.$`)
	if got := value[string](t, ctx, `document.querySelector("#timeline svg").getAttribute("aria-label")`); !label.MatchString(got) {
		t.Errorf("the timeline's label is %q", got)
	}
	if got := value[string](t, ctx, `document.querySelector("#timeline g title").textContent`); !regexp.MustCompile(`^Step [\d,]+: \S+ m?s\nGPU: .+\n\w+ → \w+: `).MatchString(got) {
		t.Errorf("of a step of the timeline it says %q", got)
	}
}

// testPurposes: what memory of peers is for, copies that are queued, and prefetches that were not used.
func testPurposes(t *testing.T, ctx context.Context) {
	t.Helper()
	// What the table of memory and the label of the chart say of the peers, at the same moment: `gpu2: KV blocks`.
	// Slabs are each for one purpose, and which peer has the slabs of which is the policy's to choose.
	const said = `(() => { const parts = []; let at = "";
		for (const r of document.querySelectorAll("#memory tbody tr")) {
			const name = r.cells[0].textContent;
			if (!r.querySelector(".part")) at = name;
			else if (at !== "gpu0" && at.startsWith("gpu")) for (const [part, of] of [["copies of experts", "copies of experts"], ["offloaded KV blocks", "KV blocks"]]) if (name === part) parts.push(at + ": " + of);
		}
		const peers = document.querySelector("#peers svg").getAttribute("aria-label").matchAll(/(gpu\d): borrowed [\d.]+ \w+ \(([^)]*)\), other processes/g);
		return [parts.sort(), [...peers].flatMap(([, at, all]) => all.split(", ").map(of => at + ": " + of.replace(/ [\d.]+ \w+$/, ""))).sort()] })()`
	if err := chromedp.Run(ctx, wait(`(([table, chart]) => table.join() === chart.join() && ["copies of experts", "KV blocks"].every(of => table.some(one => one.endsWith(": " + of))))(`+said+`)`)); err != nil {
		t.Errorf("what the table and the chart say of the memory of peers: %v: %q", err, value[[2][]string](t, ctx, said))
	}
	if queues := value[[]string](t, ctx, `[...document.querySelectorAll("#links tbody tr")].map(r => r.cells[5].textContent)`); slices.ContainsFunc(queues, func(q string) bool { return !regexp.MustCompile(`^[\d,]+ / [\d,]+$`).MatchString(q) }) {
		t.Errorf("the queues of links are %q", queues)
	}
	// Links that copy are busy for a part of the time.
	run(t, ctx, wait(`[...document.querySelectorAll("#links tbody tr")].some(r => parseFloat(r.cells[1].textContent) > 0)`))
	if busy := value[[]string](t, ctx, `[...document.querySelectorAll("#links tbody tr")].map(r => r.cells[1].textContent)`); slices.ContainsFunc(busy, func(b string) bool { return !regexp.MustCompile(`^(100|\d\d?(\.\d)?) %$`).MatchString(b) }) {
		t.Errorf("links are busy %q", busy)
	}
	// Some prefetches are not used; experts have a mark where that are many.
	unused := `[...document.querySelectorAll("[role=gridcell]:not(:focus)")].map(c => [c, c.getAttribute("aria-label").match(/([\d,]+) fetch(?:es)?, ([\d,]+) prefetch(?:es)? not used, hit rate/)]).filter(([, m]) => m).map(([c, m]) => [c.dataset.unused !== undefined, ...m.slice(1).map(n => Number(n.replace(/,/g, "")))])`
	run(t, ctx, wait(unused+`.length > 0`))
	for _, x := range value[[][]any](t, ctx, unused) {
		if fetches, n := x[1].(float64), x[2].(float64); n == 0 || x[0] != (n > fetches/10) {
			t.Errorf("%v of %v fetches were prefetches that were not used; marked: %v", n, fetches, x[0])
		}
	}
}

// testViews: what the views say of data.
func testViews(t *testing.T, ctx context.Context) {
	t.Helper()
	for call, want := range map[string]string{
		`JSON.stringify(v.byPurpose({prefetch: 7, demand: 5, other: 1, migration: 2}, {demand: 1, migration: 2}))`: `[["demand","demand",4],["prefetch","prefetch",7],["other","other",1]]`,
		// Without a reading before nothing is new, without peers nothing is revoked, and counts that fall are those of another start.
		`JSON.stringify(v.reading(7, {running: 2, waiting: 1, preemptions: 5}, {kv: {used_blocks: 3, blocks: 4, block_tokens: 16}, harvest: null}))`:                                                                                `{"at":7,"running":2,"waiting":1,"used":48,"capacity":64,"preemptions":5,"preempted":0,"revoked":{}}`,
		`JSON.stringify([5, 9].map(n => v.reading(7, {preemptions: n}, {kv: {}, harvest: {revocations: {pressure: n, external: 1}}}, {preemptions: 7, revocations: {pressure: 7}})).map(s => [s.preempted, s.revoked]))`:            `[[0,{"external":1}],[2,{"pressure":2,"external":1}]]`,
		`JSON.stringify(v.tens([[9, 1, 6, {}], [11, 3, 2, {pressure: 1}], [19.9, 2, 4, {pressure: 2, external: 1}]].map(([at, running, used, revoked]) => ({at, running, waiting: 0, used, capacity: 8, preempted: 2, revoked}))))`: `[{"from":10,"running":3,"waiting":0,"used":4,"capacity":8,"preempted":4,"revoked":{"pressure":3,"external":1}},{"from":0,"running":1,"waiting":0,"used":6,"capacity":8,"preempted":2,"revoked":{}}]`,
		`JSON.stringify(v.byPurpose(undefined, undefined))`:                `[]`,
		`[0, 1, 4, 5, 15, 16].map(n => v.shade(n, 10)).join()`:             `0,1,1,2,2,3`,
		`v.stepText({step: 1234, seconds: 0.03, tokens: 1, sequences: 1})`: "Step 1,234: 30 ms, 1 token of 1 sequence\nBound by: not known",
		`v.stepText({step: 2, seconds: 0.03, predicted_seconds: 0.02, tokens: 9, sequences: 2, bound: {by: "link", src: "host", dst: "gpu0", share: 0.834}})`: "Step 2: 30 ms, 9 tokens of 2 sequences\nBound by: host → gpu0, busy 83 % of the step\n150 % of the predicted 20 ms",
		`v.stepText({step: 2, seconds: 0.03, tokens: 9, sequences: 2, bound: {by: "router-sync", share: 0.5}})`:                                               "Step 2: 30 ms, 9 tokens of 2 sequences\nBound by: waiting for the host to read the router, 50 % of the step",
		`v.bounds([{}])`: "",
		`v.borrowed({bytes_by_client: {kv: 2048, experts: 1024}})`: "borrowed 3 KiB (copies of experts 1 KiB, KV blocks 2 KiB)",
		`v.borrowed({})`: "borrowed 0 B",
		`[[{unused: true}, 0, 1], [{}, 2, 19], [{}, 2, 20], [{}, 0, 0], [{unused: true}, 0, 0], [{}, 1, 0]].map(([e, n, fetches]) => [v.unused, v.wasted].map(f => f(e, {unused_prefetches: n, fetches}))).join()`: "1,true,2,true,2,false,0,false,0,false,0,false",
		// A lane of the GPU, which computes where it does not wait, and one of each link, by time and not by step.
		`JSON.stringify(v.timed([{timeline: {begin_ns: 100, duration_ns: 50, stalls: [{for: "router-sync", from_ns: 10, to_ns: 20}], links: [{src: "host", dst: "gpu0", copies: [{for: "demand", from_ns: -5, to_ns: 5}]}]}}]))`: `[{"name":"GPU","spans":[{"for":"computing","from":100,"to":110},{"for":"router-sync","from":110,"to":120},{"for":"computing","from":120,"to":150}]},{"name":"host → gpu0","spans":[{"for":"demand","from":95,"to":105}]}]`,
		// A link whose copies ended before the steps did nothing in them.
		`(() => { const t = new v.Timeline(); t.add({step: 1, timeline: {begin_ns: 9e6, duration_ns: 5e6, stalls: [], links: [{src: "host", dst: "gpu0", copies: [{for: "demand", from_ns: -9, to_ns: -5}]}]}}); t.draw(); return document.querySelector("#timeline-said").textContent })()`: "1 consecutive step in 5 ms. GPU: computing 100 %; host → gpu0: nothing.",
		// Steps with more than a second between them are of different requests; the longer run of the last two is shown.
		`(() => { const t = new v.Timeline(), said = []; for (const [step, at] of [[1, 0], [2, 6e6], [3, 9e9], [4, 9e9 + 7e6], [5, 9e9 + 14e6], [1, 3e6]]) { t.add({step, timeline: {begin_ns: at, duration_ns: 5e6, stalls: [], links: []}}); t.draw(); said.push(document.querySelector("#timeline-said").textContent) } return said.map(s => s.split(".")[0]).join() })()`: "1 consecutive step in 5 ms,2 consecutive steps in 11 ms,2 consecutive steps in 11 ms,2 consecutive steps in 12 ms,3 consecutive steps in 19 ms,3 consecutive steps in 19 ms",
		`JSON.stringify(v.shares([{for: "a", from: 0, to: 10}, {for: "b", from: 10, to: 15}, {for: "a", from: 30, to: 40}], 5, 25))`:             `[["a",0.25],["b",0.25]]`,
		`v.bounds([{}, {bound: {by: "compute", share: 1}}])`:                                                                                     "All of these steps are bound by computing.",
		`v.bounds([{bound: {by: "compute", share: 0.6}}, ...[0.7, 0.9].map(share => ({bound: {by: "link", src: "gpu1", dst: "gpu0", share}}))])`: "Of these steps 2 are bound by gpu1 → gpu0 (busy 80 % of their time), 1 by computing.",
	} {
		if got := value[string](t, ctx, `import("/page/views.js").then(v => `+call+`)`); got != want {
			t.Errorf("%s is %q, want %q", call, got, want)
		}
	}
}

// TestLargeGrid: as many experts as Qwen3-30B-A3B has are in sight at once, and with a button each has its letter.
func TestLargeGrid(t *testing.T) {
	fixture, dir := "../../testdata/fixtures/qwen3_moe", t.TempDir()
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		data, err := os.ReadFile(filepath.Join(fixture, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	data, err := os.ReadFile(filepath.Join(fixture, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	var config map[string]any
	if err := json.Unmarshal(data, &config); err != nil {
		t.Fatal(err)
	}
	config["num_hidden_layers"], config["num_experts"], config["num_local_experts"], config["moe_intermediate_size"] = 48, 128, 128, 16
	if data, err = json.Marshal(config); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), data, 0o666); err != nil {
		t.Fatal(err)
	}
	n := serve(t, nil, dir, "--load-format", "dummy", "--offload-fraction", "0.5")
	ctx := browse(t)
	run(t, ctx, size(1280, 900), chromedp.Navigate(n.admin+"/"), wait(`document.querySelectorAll("[role=gridcell][data-tier]").length === 48 * 128`))
	hidden := `(() => { const s = document.querySelector("#grid").parentNode; return [s.scrollWidth - s.clientWidth, s.scrollHeight - s.clientHeight, document.querySelector("#grid").offsetHeight] })()`
	if got := value[[]int](t, ctx, hidden); got[0] > 0 || got[1] > 0 || got[2] > 700 {
		t.Errorf("%d pixels to the right and %d below are out of sight, and it is %d high", got[0], got[1], got[2])
	}
	run(t, ctx, chromedp.Click(`[data-row="47"][data-column="127"]`))
	if said := value[string](t, ctx, `document.querySelector("#expert").textContent`); !strings.HasPrefix(said, "Layer 47, expert 127: ") {
		t.Errorf("of the last expert it says %q", said)
	}
	accessible(t, ctx, "a large grid")
	shoot(t, ctx, "admin-page-large.png")
	run(t, ctx, chromedp.Click("#grid-size button"))
	if size := value[float64](t, ctx, `parseFloat(getComputedStyle(document.querySelector("[role=gridcell]")).fontSize)`); size < 10 {
		t.Errorf("letters of %v pixels", size)
	}
	run(t, ctx, chromedp.Click("#grid-size button"))
	if got := value[[]int](t, ctx, hidden); got[0] > 0 || got[1] > 0 {
		t.Errorf("small again, %d pixels to the right and %d below are out of sight", got[0], got[1])
	}
}

// TestKey: with a key the page asks for it, and then shows the node.
func TestKey(t *testing.T) {
	n := serve(t, []string{"MOESERVE_API_KEY=secret"}, "--peers", "none")
	ctx := browse(t)
	run(t, ctx, chromedp.Navigate(n.admin+"/"), chromedp.WaitVisible("#key"),
		chromedp.SendKeys("#key-text", "wrong"+kb.Enter), wait(`document.querySelector("#state").textContent === "The server needs an API key"`),
		chromedp.SendKeys("#key-text", "secret"+kb.Enter), wait(`document.querySelectorAll("[role=gridcell]").length > 0`), chromedp.WaitNotVisible("#key"))
	if stored := value[string](t, ctx, `JSON.stringify(localStorage)`); strings.Contains(stored, "secret") {
		t.Error("the key is kept beyond the tab")
	}
	// Without peers nothing is said of revocations, and before a request no latency is.
	run(t, ctx, wait(`document.querySelectorAll("#load figure").length > 0`))
	if shown := value[[]string](t, ctx, `[...document.querySelectorAll("#load b")].map(b => b.textContent)`); !slices.Equal(shown, []string{"Sequences", "KV cache", "Preemptions per 10 s"}) {
		t.Errorf("without peers the load is %q", shown)
	}
	now := value[string](t, ctx, `[...document.querySelectorAll("#now div")].map(d => d.textContent).join("; ")`)
	if strings.Contains(now, "Revocations") || !strings.Contains(now, "TPOT, median / p99– ms; ") {
		t.Errorf("without peers and requests the header is %q", now)
	}
}

// TestPolicy: the page asks nothing of other servers, and the API's address does not have it.
func TestPolicy(t *testing.T) {
	n := serve(t, nil)
	for _, path := range []string{"/", "/page/page.js", "/page/page.css"} {
		r, err := http.Get(n.admin + path)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		_ = r.Body.Close()
		if r.StatusCode != http.StatusOK || !strings.Contains(r.Header.Get("Content-Security-Policy"), "default-src 'none'") {
			t.Errorf("%s: %s, %v", path, r.Status, r.Header)
		}
		if path == "/" && regexp.MustCompile(`(src|href)="https?:|style=|onclick|<script>`).Match(body) {
			t.Error("the page has a style, a script or an address of another server in it")
		}
	}
	r, err := http.Get(n.api + "/page/page.js")
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Body.Close()
	if r.StatusCode != http.StatusNotFound {
		t.Errorf("the API has the page: %s", r.Status)
	}
}
