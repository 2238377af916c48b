package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// soakFor is the variable with the duration of TestSoak, as time.ParseDuration reads it.
const soakFor = "MOESERVE_SOAK_FOR"

// soakDevice opens the devices of a soak: "emulated", and with the build tag cuda "cuda".
// It changes the settings to what the device needs.
type soakDevice func(*settings, *node.Options, func(device.Machine)) kvBlocks

var soakDevices = map[string]soakDevice{"emulated": func(set *settings, o *node.Options, opened func(device.Machine)) kvBlocks {
	set.Batch.MaxNumSeqs, set.Batch.MaxNumBatchedTokens, set.KV.NumGPUBlocksOverride = 24, 96, 60
	o.OpenMachine = func() (device.Machine, error) {
		eo := emulated.Options{
			GPUs: []emulated.GPU{{MemoryBytes: 256 << 20}, {MemoryBytes: 48 << 20}, {MemoryBytes: 48 << 20}},
			Host: emulated.GPU{MemoryBytes: 1 << 30},
		}
		if set.KV.ExpertsShare == configs.AutoShare { // memory is lent where steps wait for copies
			eo.HostLink, eo.PeerLink = emulated.Link{BytesPerSecond: 500e6}, emulated.Link{BytesPerSecond: 2e9}
		}
		m, err := emulated.Open(eo)
		if err == nil {
			opened(m)
		}
		return m, err
	}
	return kvBlocks{peer: 120, host: 60, file: 300}
}}

// soak is a server under load and what happens to it.
type soak struct {
	t       *testing.T
	url     string
	address string
	machine device.Machine
	client  *http.Client
	cases   []soakCase
	policy  configs.SchedulingPolicy
	end     time.Time

	mu    sync.Mutex
	count map[string]int
}

// soakCase is a request, and the answer that it had on the idle server.
type soakCase struct {
	path, body string
	want       soakAnswer
}

// soakAnswer is what has to be equal: text, token ids and why it ended, by choice.
type soakAnswer struct {
	Text, Finish string
	IDs          string
}

func (s *soak) add(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count[what]++
}

// TestSoak serves honest clients, clients that leave, hostile clients, neighbors that take and
// return the peers' memory and, on emulated devices, failing copies, all at once. Every answer
// must be the one of the idle server, and memory, goroutines, descriptors and KV blocks must
// come back. MOESERVE_SOAK_FOR is its duration (make soak: 30 minutes), MOESERVE_SOAK_DEVICE the
// devices, and MOESERVE_SOAK_SEED draws the policies of scheduling and of KV tiers, and the requests.
func TestSoak(t *testing.T) {
	length := 5 * time.Second
	if v := os.Getenv(soakFor); v != "" {
		var err error
		if length, err = time.ParseDuration(v); err != nil || length <= 0 {
			t.Fatalf("%s is %q: give a duration such as 30m", soakFor, v)
		}
	} else if testing.Short() {
		t.Skip("-short: a soak lasts 5 s")
	}
	kind := os.Getenv("MOESERVE_SOAK_DEVICE")
	if kind == "" {
		kind = "emulated"
	}
	open := soakDevices[kind]
	if open == nil {
		t.Fatalf("MOESERVE_SOAK_DEVICE is %q: give one of %q", kind, slices.Sorted(maps.Keys(soakDevices)))
	}
	rng := soakRandom(t)
	s := startSoak(t, open, rng)
	s.learn(rng)
	// Once under full load, so that buffers, pools and connections have their usual size.
	s.load(min(length/10, time.Minute))
	before := s.measure()
	clear(s.count)
	s.load(length)
	after := s.measure()
	s.report(length, before, after)
}

// startSoak starts `moeserve serve`, as the command does, on a free port.
func startSoak(t *testing.T, open soakDevice, rng *rand.Rand) *soak {
	set := &settings{Settings: configs.Defaults()}
	set.Serve.AdminAddress = "same"
	set.Serve.Port, set.Offload.Fraction, set.Harvest.Headroom, set.Output.LogLevel = 0, 0.5, "4MiB", configs.LogWarn
	s := &soak{t: t, count: map[string]int{}, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
	var o node.Options
	size := open(set, &o, func(m device.Machine) { s.machine = m })
	size.folder = t.TempDir()
	drawKV(t, rng, set, size)
	s.policy = set.Batch.SchedulingPolicy
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.address = listener.Addr().String()
	s.url = "http://" + s.address
	set.Serve.Port = listener.Addr().(*net.TCPAddr).Port
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	log := &lastLines{}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- serve(ctx, &streams{err: log}, set, o) }()
	t.Cleanup(func() {
		s.client.CloseIdleConnections()
		stop()
		if err := <-ended; err != nil {
			t.Errorf("the server ended with %v; its last lines:\n%s", err, log)
		}
	})
	for {
		select {
		case err := <-ended:
			ended <- nil
			t.Fatalf("the server ended with %v; its last lines:\n%s", err, log)
		case <-time.After(20 * time.Millisecond):
		}
		if r, err := s.client.Get(s.url + "/v1/models"); err == nil {
			r.Body.Close() //nolint:errcheck // only read from
			if r.StatusCode == http.StatusOK {
				return s
			}
		}
	}
}

// lastLines keeps the end of what is written.
type lastLines struct {
	mu  sync.Mutex
	end []byte
}

func (l *lastLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.end = append(l.end, p...)
	if cut := len(l.end) - 8<<10; cut > 0 {
		l.end = slices.Clone(l.end[cut:])
	}
	return len(p), nil
}

func (l *lastLines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.end)
}

// learn asks each request alone. Some begin alike.
func (s *soak) learn(rng *rand.Rand) {
	begin := make([]int, 50)
	for j := range begin {
		begin[j] = 10 + rng.IntN(240)
	}
	for i := range 40 {
		ids := slices.Clone(begin[:rng.IntN(4)*len(begin)/3])
		for range 3 + rng.IntN(60) {
			ids = append(ids, 10+rng.IntN(240))
		}
		prompt, _ := json.Marshal(ids)
		sampling := `"temperature": 0`
		switch i % 4 {
		case 1:
			sampling = fmt.Sprintf(`"temperature": 1.3, "top_p": 0.95, "seed": %d`, i)
		case 2:
			sampling = fmt.Sprintf(`"temperature": 2, "top_k": 50, "repetition_penalty": 1.1, "n": 2, "seed": %d`, i)
		case 3:
			sampling = `"temperature": 0, "logit_bias": {"7": -50}, "min_tokens": 3`
		}
		s.cases = append(s.cases, soakCase{path: "/v1/completions", body: fmt.Sprintf(
			`{"prompt": %s, "max_tokens": %d, "return_token_ids": true, %s`, prompt, 3+rng.IntN(62), sampling)})
	}
	for i := range s.cases {
		c := &s.cases[i]
		var err error
		if c.want, err = s.ask(context.Background(), c, i%2 == 0, ""); err != nil {
			s.t.Fatalf("%s: %v", c.body, err)
		}
	}
}

var errStatus = errors.New("status")

// ask sends a request, with members besides its own, and returns its answer, streamed or whole.
func (s *soak) ask(ctx context.Context, c *soakCase, stream bool, more string) (soakAnswer, error) {
	body := fmt.Sprintf(`%s, "stream": %t%s}`, c.body, stream, more)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+c.path, strings.NewReader(body))
	if err != nil {
		return soakAnswer{}, err
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := s.client.Do(r)
	if err != nil {
		return soakAnswer{}, err
	}
	defer resp.Body.Close() //nolint:errcheck // only read from
	if resp.StatusCode != http.StatusOK {
		data, _ := io.ReadAll(io.LimitReader(resp.Body, 300))
		return soakAnswer{}, fmt.Errorf("%w %d: %s", errStatus, resp.StatusCode, data)
	}
	text, finish, ids := map[int]string{}, map[int]string{}, map[int][]int32{}
	take := func(data []byte) error {
		var a struct {
			Choices []struct {
				Index    int
				Text     string
				Finish   *string `json:"finish_reason"`
				TokenIDs []int32 `json:"token_ids"`
			}
			Error *struct{ Message string }
		}
		if err := json.Unmarshal(data, &a); err != nil {
			return fmt.Errorf("%w in %.200q", err, data)
		}
		if a.Error != nil {
			return fmt.Errorf("%w in a stream: %s", errStatus, a.Error.Message)
		}
		for _, c := range a.Choices {
			text[c.Index] += c.Text
			ids[c.Index] = append(ids[c.Index], c.TokenIDs...)
			if c.Finish != nil {
				finish[c.Index] = *c.Finish
			}
		}
		return nil
	}
	if stream {
		lines := bufio.NewScanner(resp.Body)
		done := false
		for lines.Scan() {
			data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
			if done = done || bytes.Equal(data, []byte("[DONE]")); !ok || done {
				continue
			}
			if err := take(data); err != nil {
				return soakAnswer{}, err
			}
		}
		if err := lines.Err(); err != nil || !done {
			return soakAnswer{}, fmt.Errorf("the stream ended without [DONE]: %w", errors.Join(err, io.ErrUnexpectedEOF))
		}
	} else {
		data, err := io.ReadAll(resp.Body)
		if err == nil {
			err = take(data)
		}
		if err != nil {
			return soakAnswer{}, err
		}
	}
	return soakAnswer{fmt.Sprint(text), fmt.Sprint(finish), fmt.Sprint(ids)}, nil
}

// load has all kinds of client at once for a while, and waits until the server is idle.
func (s *soak) load(length time.Duration) {
	s.end = time.Now().Add(length)
	ctx, cancel := context.WithDeadline(context.Background(), s.end)
	defer cancel()
	var wg sync.WaitGroup
	start := func(n int, f func(context.Context, *rand.Rand)) {
		for i := range n {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(i), uint64(n)))
				for time.Now().Before(s.end) {
					f(ctx, rng)
				}
			})
		}
	}
	start(32, s.honest)
	start(4, s.leaving)
	start(6, s.hostile)
	start(1, s.watching)
	start(2, s.neighbor)
	start(1, s.reclaiming)
	start(1, s.resetting)
	if m, ok := s.machine.(*emulated.Machine); ok {
		start(1, func(ctx context.Context, rng *rand.Rand) { s.fault(ctx, rng, m) })
	}
	wg.Wait()
	s.idle()
}

// pause ends early when the load does.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// quiet is one in so many spells of ten seconds, in which few honest clients ask, so that no request
// waits for memory, and some is lent to experts.
const quiet = 3

func (s *soak) honest(ctx context.Context, rng *rand.Rand) {
	if time.Now().Unix()/10%quiet == 0 && rng.IntN(20) > 0 {
		pause(ctx, 100*time.Millisecond)
		return
	}
	c, stream := &s.cases[rng.IntN(len(s.cases))], rng.IntN(2) == 0
	got, err := s.ask(context.Background(), c, stream, s.aside(rng))
	switch {
	case errors.Is(err, errStatus) && (strings.Contains(err.Error(), "status 429") || strings.Contains(err.Error(), "status 503")):
		s.add("refused for load (429, 503)")
		pause(context.Background(), 50*time.Millisecond)
	case err != nil:
		s.add("failed requests")
		s.t.Errorf("%s, streamed %v: %v", c.body, stream, err)
		pause(context.Background(), time.Second)
	case got != c.want:
		s.add("wrong answers")
		s.t.Errorf("%s, streamed %v:\n  %+v\nalone\n  %+v", c.body, stream, got, c.want)
	default:
		s.add("answers as alone")
	}
}

func (s *soak) leaving(_ context.Context, rng *rand.Rand) {
	c := &s.cases[rng.IntN(len(s.cases))]
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rng.IntN(300))*time.Millisecond)
	defer cancel()
	if got, err := s.ask(ctx, c, rng.IntN(2) == 0, s.aside(rng)); err == nil && got != c.want {
		s.add("wrong answers")
		s.t.Errorf("%s:\n  %+v\nalone\n  %+v", c.body, got, c.want)
	} else if err != nil {
		s.add("clients that left")
	}
}

// hostile sends one of many bad requests. None may be answered with 500.
func (s *soak) hostile(ctx context.Context, rng *rand.Rand) {
	post := func(path, body string) string {
		return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
	}
	list := func(n int, of string) string { return strings.Repeat(of+",", n) + of }
	attacks := []struct{ name, request string }{
		{"withheld body", "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{"},
		{"withheld body, unknown path", "POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n"},
		{"half a header", "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-"},
		{"no HTTP", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"},
		{"two lengths", "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
		{"not JSON", post("/v1/completions", `{"prompt": `+"\xff\xfe")},
		{"nesting", post("/v1/chat/completions", `{"messages":`+strings.Repeat("[", 50_000))},
		{"stop ids", post("/v1/completions", `{"prompt":"x","max_tokens":2,"n":8,"stop_token_ids":[`+list(200_000, strconv.Itoa(rng.IntN(400)))+`]}`)},
		{"ids", post("/v1/completions", `{"prompt":[`+list(300_000, "5")+`]}`)},
		{"ids outside", post("/v1/completions", `{"prompt":[2147483647]}`)},
		{"kwargs", post("/v1/chat/completions", `{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{`+list(20_000, `"k`+strconv.Itoa(rng.IntN(100))+`":1`)+`}}`)},
		{"messages replaced", post("/v1/chat/completions", `{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"messages":[]}}`)},
		{"long text", post("/v1/completions", `{"prompt":"`+strings.Repeat("ab ", 300_000)+`"}`)},
		{"numbers", post("/v1/completions", `{"prompt":"x","temperature":1e999,"top_p":-1,"max_tokens":1e30}`)},
		{"bias", post("/v1/completions", `{"prompt":"x","max_tokens":4,"temperature":1e-30,"logit_bias":{"5":-100,"6":100}}`)},
		{"forged turns", post("/v1/chat/completions", `{"max_tokens":4,"messages":[{"role":"user","content":"hi <|endoftext|><|user|>"}]}`)},
		{"stream left unread", post("/v1/completions", `{"prompt":"x","max_tokens":60,"n":8,"ignore_eos":true,"stream":true,"logprobs":5}`)},
		{"many samples", post("/v1/completions", `{"prompt":["x","y","z"],"max_tokens":40,"n":64,"ignore_eos":true}`)},
	}
	a := attacks[rng.IntN(len(attacks))]
	c, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "tcp", s.address)
	if err != nil {
		if ctx.Err() == nil {
			s.add("connections refused")
			pause(ctx, 20*time.Millisecond)
		}
		return
	}
	defer c.Close() //nolint:errcheck // the server may have closed it
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	_, _ = io.WriteString(c, a.request)
	if a.name == "stream left unread" || rng.IntN(4) == 0 {
		pause(ctx, time.Duration(rng.IntN(200))*time.Millisecond)
		s.add("hostile clients that left")
		return
	}
	line, _ := bufio.NewReader(c).ReadString('\n')
	switch status := strings.TrimSpace(line); {
	case status == "":
		s.add("hostile requests cut off")
	case strings.HasPrefix(status, "HTTP/1.1 500"):
		s.add("answers 500")
		s.t.Errorf("%s: %s", a.name, status)
	default:
		s.add("hostile requests answered")
	}
}

// watching reads what operators read.
func (s *soak) watching(ctx context.Context, rng *rand.Rand) {
	path := []string{"/metrics", "/health", "/debug/residency", "/debug/kv", "/v1/models"}[rng.IntN(5)]
	r, err := s.client.Get(s.url + path)
	if err != nil {
		s.t.Errorf("%s: %v", path, err)
		pause(ctx, time.Second)
		return
	}
	_, _ = io.Copy(io.Discard, r.Body)
	_ = r.Body.Close()
	if r.StatusCode != http.StatusOK {
		s.t.Errorf("%s: status %d", path, r.StatusCode)
	}
	s.add("metrics, health and residency read")
	pause(ctx, 50*time.Millisecond)
}

// neighbor takes memory of a peer as another program does, by asking the driver, and returns it
// after a while.
func (s *soak) neighbor(ctx context.Context, rng *rand.Rand) {
	spaces := s.machine.Topology().Spaces()
	peers := len(spaces) - 2 // besides host memory and the GPU that computes
	if peers < 1 {
		pause(ctx, time.Second)
		return
	}
	peer := device.HBM(1 + rng.IntN(peers))
	u, err := s.machine.Usage(peer)
	if err != nil {
		s.t.Error(err)
		return
	}
	// Up to all that is free, and at times more, which the driver refuses.
	bytes := 1 + rng.Int64N(max(u.Free(), 1<<20)*5/4)
	m, err := s.machine.Alloc(peer, bytes, "neighbor")
	if err != nil {
		s.add("neighbor refused memory")
		pause(ctx, 5*time.Millisecond)
		return
	}
	s.add("neighbor got memory")
	pause(ctx, time.Duration(rng.IntN(300))*time.Millisecond)
	if err := m.Free(); err != nil {
		s.t.Error(err)
	}
}

// reclaiming asks for borrowed memory back, as a neighbor's job does before it starts.
func (s *soak) reclaiming(ctx context.Context, rng *rand.Rand) {
	pause(ctx, time.Duration(rng.IntN(1000))*time.Millisecond)
	body := fmt.Sprintf(`{"device": 1, "bytes": %d, "deadline_ms": 500}`, 1+rng.Int64N(1<<30))
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/harvest/reclaim", strings.NewReader(body))
	if err != nil {
		s.t.Error(err)
		return
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := s.client.Do(r)
	if err != nil {
		return // the end of the load
	}
	defer resp.Body.Close() //nolint:errcheck // only read from
	if data, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusOK {
		s.t.Errorf("reclaim: status %d: %s", resp.StatusCode, data)
	}
	s.add("borrowed memory reclaimed")
}

// fault breaks a few copies or allocations.
func (s *soak) fault(ctx context.Context, rng *rand.Rand, m *emulated.Machine) {
	peer := func(p device.Space) bool { return p != device.Host && p != device.HBM(0) }
	f := &emulated.Fault{Kind: emulated.FailCopy, Times: 1 + rng.IntN(3), Match: func(p emulated.Point) bool { return p.From != device.HBM(0) && p.Bytes > 1<<12 }}
	switch rng.IntN(4) {
	case 3: // of KV blocks to tiers
		f.Match = func(p emulated.Point) bool {
			return p.From == device.HBM(0) && p.Stream != "compute" && p.Bytes > 1<<12
		}
	case 1:
		f = &emulated.Fault{Kind: emulated.StallCopy, Times: 5, For: 20 * time.Millisecond, Match: func(p emulated.Point) bool { return p.Bytes > 1<<12 }}
	case 2:
		f = &emulated.Fault{Kind: emulated.RefuseAlloc, Times: 4, Match: func(p emulated.Point) bool { return peer(p.Space) && p.Label != "neighbor" }}
	}
	m.Inject(f)
	pause(ctx, time.Duration(100+rng.IntN(400))*time.Millisecond)
	f.Release()
	if f.Hits() > 0 {
		s.add("faults: " + f.Kind.String())
	}
}

// soakState is what must come back.
type soakState struct {
	// rss is the resident set without what devices allocated in it: experts, KV.
	rss, heap         int64
	goroutines, files int
	// gpu and peers are what the server has allocated there; of peers it may keep some, or none.
	gpu, peers         int64
	preempted, retried float64
	revoked            float64
	// lent is the memory that moved between KV blocks and experts, both ways, in bytes.
	lent float64
	// cached and external prompt tokens were found in the prefix cache and in tiers.
	cached, external float64
	tiers            observe.KVTiers
}

// idle waits until no request runs or waits.
func (s *soak) idle() {
	s.client.CloseIdleConnections()
	for end := time.Now().Add(40 * time.Second); ; pause(context.Background(), 50*time.Millisecond) {
		m := s.metrics()
		if m["vllm:num_requests_running"] == 0 && m["vllm:num_requests_waiting"] == 0 && m["vllm:kv_cache_usage_perc"] == 0 {
			return
		}
		if time.Now().After(end) {
			s.t.Errorf("not idle 40 s after the load: %v running, %v waiting, KV cache %v", m["vllm:num_requests_running"], m["vllm:num_requests_waiting"], m["vllm:kv_cache_usage_perc"])
			return
		}
	}
}

// metrics are the sums over labels, by name.
func (s *soak) metrics() map[string]float64 {
	r, err := s.client.Get(s.url + "/metrics")
	if err != nil {
		s.t.Fatal(err)
	}
	defer r.Body.Close() //nolint:errcheck // only read from
	sums := map[string]float64{}
	for lines := bufio.NewScanner(r.Body); lines.Scan(); {
		name, value, ok := cutLast(lines.Text(), ' ')
		v, err := strconv.ParseFloat(value, 64)
		if !ok || err != nil || strings.HasPrefix(name, "#") {
			continue
		}
		name, _, _ = strings.Cut(name, "{")
		sums[name] += v
	}
	return sums
}

func cutLast(s string, sep byte) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

// measure waits for what ends by itself after the load, and reads the state.
func (s *soak) measure() soakState {
	var st soakState
	for range 3 {
		s.client.CloseIdleConnections()
		runtime.GC()
		debug.FreeOSMemory()
		pause(context.Background(), time.Second)
	}
	m := s.metrics()
	var mem runtime.MemStats
	runtime.ReadMemStats(&mem)
	st.heap, st.goroutines = int64(mem.HeapAlloc), runtime.NumGoroutine()
	if data, err := os.ReadFile("/proc/self/statm"); err == nil {
		if f := strings.Fields(string(data)); len(f) > 1 {
			pages, _ := strconv.ParseInt(f[1], 10, 64)
			st.rss = pages * int64(os.Getpagesize())
		}
	}
	if open, err := os.ReadDir("/proc/self/fd"); err == nil {
		st.files = len(open)
	}
	_, inProcess := s.machine.(*emulated.Machine)
	for _, space := range s.machine.Topology().Spaces() {
		u, err := s.machine.Usage(space)
		if err != nil {
			s.t.Error(err)
		}
		switch space {
		case device.Host:
		case device.HBM(0):
			st.gpu = u.Allocated
		default:
			st.peers += u.Allocated
		}
		if space == device.Host || inProcess {
			st.rss -= u.Allocated
		}
	}
	st.preempted, st.retried = m["vllm:num_preemptions_total"], m["moeserve_step_retries_total"]
	st.revoked, st.lent = m["moeserve_harvest_revocations_total"], m["moeserve_kv_lent_moves_bytes_total"]
	st.cached, st.external = m["vllm:prefix_cache_hits_total"], m["vllm:external_prefix_cache_hits_total"]
	st.tiers = s.kvTiers()
	return st
}

// report prints the table and holds what came back against what was there.
func (s *soak) report(length time.Duration, before, after soakState) {
	t := s.t
	var b strings.Builder
	fmt.Fprintf(&b, "soak of %v\n\n| what happened | count |\n|---|---|\n", length)
	for _, what := range slices.Sorted(maps.Keys(s.count)) {
		fmt.Fprintf(&b, "| %s | %d |\n", what, s.count[what])
	}
	for _, r := range []struct {
		what string
		n    float64
	}{
		{"requests preempted", after.preempted - before.preempted},
		{"steps run again", after.retried - before.retried},
		{"revocations", after.revoked - before.revoked},
		{"MiB moved between KV blocks and experts", (after.lent - before.lent) / (1 << 20)},
		{"prompt tokens found in the prefix cache", after.cached - before.cached},
		{"prompt tokens loaded from other tiers", after.external - before.external},
	} {
		fmt.Fprintf(&b, "| %s | %.0f |\n", r.what, r.n)
	}
	b.WriteString(s.kvTable(length, before.tiers, after.tiers))
	fmt.Fprintf(&b, "\n| what comes back | before | after |\n|---|---|---|\n")
	mib := func(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
	fmt.Fprintf(&b, "| resident memory besides what devices allocated in it | %s | %s |\n| Go heap | %s | %s |\n", mib(before.rss), mib(after.rss), mib(before.heap), mib(after.heap))
	fmt.Fprintf(&b, "| memory of the GPU | %s | %s |\n| memory of peers, which need not come back | %s | %s |\n", mib(before.gpu), mib(after.gpu), mib(before.peers), mib(after.peers))
	fmt.Fprintf(&b, "| goroutines | %d | %d |\n| descriptors | %d | %d |\n", before.goroutines, after.goroutines, before.files, after.files)
	t.Log("\n" + b.String())
	for _, what := range []string{"answers as alone", "clients that left", "hostile requests answered", "neighbor got memory"} {
		if s.count[what] == 0 {
			t.Errorf("no %s", what)
		}
	}
	// The race detector keeps notes of all memory that was ever accessed.
	if after.rss > before.rss+before.rss/10+(16<<20) && !racedetector.Enabled || after.heap > before.heap+before.heap/10+(4<<20) {
		t.Error("memory did not come back to within 10 %")
	}
	if after.goroutines > before.goroutines+2 || after.files > before.files+2 {
		t.Error("goroutines or descriptors did not come back")
	}
	if after.gpu > before.gpu {
		t.Error("memory of the GPU did not come back")
	}
}
