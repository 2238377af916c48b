package server_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/sleeping"
	"github.com/moeserve/moeserve/server"
)

// nap is a server.Sleeper of the harness's node.
type nap struct{ h *harness }

func (s nap) Sleep(ctx context.Context, level int, mode engine.PauseMode) error {
	_, err := s.h.node.Sleep(ctx, sleeping.Level(level), mode)
	return lacksMemory(err)
}

func (s nap) Wake(ctx context.Context, tags []string) error {
	var all []sleeping.Tag
	for _, t := range tags {
		all = append(all, sleeping.Tag(t))
	}
	_, err := s.h.node.Wake(ctx, all...)
	return lacksMemory(err)
}

func lacksMemory(err error) error {
	if errors.Is(err, device.ErrOutOfMemory) {
		return &server.OutOfMemoryError{Err: err}
	}
	return err
}

func (s nap) Level() int { return int(s.h.node.Sleeping().Level) }

// startSleeper starts a server that can sleep, on devices of its own. While slow is set, where it is given, steps take
// 50 ms at least, so that requests do not end before a test has done what it does meanwhile.
func startSleeper(t *testing.T, o emulated.Options, slow *atomic.Bool) (*harness, *emulated.Machine) {
	t.Helper()
	settings := configs.Defaults()
	settings.Offload.Fraction = 0.5
	var m *emulated.Machine
	s := &nap{}
	l := engine.Listener{StepFinished: func(engine.StepInfo) {
		if slow != nil && slow.Load() {
			time.Sleep(50 * time.Millisecond)
		}
	}}
	h := start(t, options{
		server: server.Options{Admin: true},
		node: node.Options{Settings: settings, Listener: l, OpenMachine: func() (_ device.Machine, err error) {
			m, err = emulated.New(o)
			return m, err
		}},
		change: func(m *server.Model) { m.Sleeper = s },
	})
	s.h = h
	return h, m
}

// until waits until something holds of the engine's state, for a minute at most.
func (h *harness) until(what string, holds func(engine.State) bool) {
	h.t.Helper()
	for end := time.Now().Add(time.Minute); !holds(h.State()); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			h.t.Fatalf("never: %s; the engine: %+v", what, h.State())
		}
	}
}

func (h *harness) sleeps() string { return h.send(http.MethodGet, "/is_sleeping", "").body }

// TestSleep: sleep and wake over HTTP: what health, metrics and requests say meanwhile, and that
// answers are the same afterwards.
func TestSleep(t *testing.T) {
	h, _ := startSleeper(t, emulated.Options{}, nil)
	body := completionBody(`"sort: t h m o e e ="`, `, "temperature": 0`)
	want := decode[reply](t, h.post(completionsPath, body)).Choices[0].Text
	if got := h.sleeps(); strings.TrimSpace(got) != `{"is_sleeping":false}` {
		t.Errorf("awake: %s", got)
	}
	for i, state := range []string{"weights_offloaded", "discard_all"} {
		for range 2 { // the second does nothing
			if a := h.send(http.MethodPost, fmt.Sprintf("/sleep?level=%d&mode=wait", i+1), ""); a.status != http.StatusOK || a.body != "" {
				t.Fatalf("sleep: %d %s", a.status, a.body)
			}
		}
		if got := h.sleeps(); strings.TrimSpace(got) != `{"is_sleeping":true}` {
			t.Errorf("asleep: %s", got)
		}
		if a := h.send(http.MethodGet, "/health", ""); a.status != http.StatusOK || !strings.Contains(a.body, `"sleeping"`) {
			t.Errorf("/health asleep: %d %s", a.status, a.body)
		}
		if a := h.send(http.MethodGet, "/health/ready", ""); a.status != http.StatusServiceUnavailable || !strings.Contains(a.body, "/wake_up") {
			t.Errorf("/health/ready asleep: %d %s", a.status, a.body)
		}
		if a := h.send(http.MethodGet, "/v1/models", ""); a.status != http.StatusOK {
			t.Errorf("/v1/models asleep: %d", a.status)
		}
		m := h.scrape()
		for _, name := range []string{"awake", "weights_offloaded", "discard_all"} {
			got, is := m[`vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="`+name+`"}`], 0.0
			if name == state {
				is = 1
			}
			if got != is {
				t.Errorf("level %d: vllm:engine_sleep_state of %s is %v", i+1, name, got)
			}
		}
		answer := make(chan string, 1)
		go func() { answer <- decode[reply](t, h.post(completionsPath, body)).Choices[0].Text }()
		h.until("a request waits", func(s engine.State) bool { return s.Waiting > 0 })
		if a := h.send(http.MethodPost, "/wake_up?tags=kv_cache", ""); a.status != http.StatusOK {
			t.Errorf("wake of the KV cache: %d %s", a.status, a.body)
		}
		if got := h.sleeps(); strings.TrimSpace(got) != `{"is_sleeping":true}` || h.node.Sleeping().KVCache {
			t.Errorf("with the KV cache awake: %s, %+v", got, h.node.Sleeping())
		}
		for range 2 { // the second does nothing
			if a := h.send(http.MethodPost, "/wake_up", ""); a.status != http.StatusOK || a.body != "" {
				t.Fatalf("wake: %d %s", a.status, a.body)
			}
		}
		if got := <-answer; got != want {
			t.Errorf("a request that waited for the wake is answered %q, want %q", got, want)
		}
	}
}

// TestSleepAborts: a request that runs when its model is put to sleep ends with an error that says
// so, and one with mode keep goes on.
func TestSleepAborts(t *testing.T) {
	var slow atomic.Bool
	h, _ := startSleeper(t, emulated.Options{}, &slow)
	body := completionBody(`"1+2="`, `, "ignore_eos": true, "max_tokens": 200, "temperature": 0`)
	want := decode[reply](t, h.post(completionsPath, body)).Choices[0].Text
	for _, mode := range []string{"", "?mode=keep"} {
		slow.Store(true) // the request takes 10 s
		ended := make(chan answer, 1)
		go func() { ended <- h.send(http.MethodPost, completionsPath, body) }()
		h.until("a request runs", func(s engine.State) bool { return s.Running > 0 })
		if a := h.send(http.MethodPost, "/sleep"+mode, ""); a.status != http.StatusOK {
			t.Fatalf("sleep: %d %s", a.status, a.body)
		}
		slow.Store(false)
		if a := h.send(http.MethodPost, "/wake_up", ""); a.status != http.StatusOK {
			t.Fatalf("wake: %d %s", a.status, a.body)
		}
		a := <-ended
		if mode != "" {
			if got := decode[reply](t, a.body).Choices[0].Text; got != want {
				t.Errorf("a request that slept is answered %q, want %q", got, want)
			}
			continue
		}
		if _, _, _, code := failed(t, a); a.status != http.StatusServiceUnavailable || code != "model_asleep" || a.header.Get("Retry-After") == "" {
			t.Errorf("an aborted request: %d %s", a.status, a.body)
		}
	}
}

// TestSleepErrors: bad parameters, a host without memory for the weights, and others that have the
// GPU's memory at the wake, after which it can be tried again.
func TestSleepErrors(t *testing.T) {
	h, m := startSleeper(t, emulated.Options{GPUs: slices.Repeat([]emulated.GPU{{MemoryBytes: 256 << 20}}, 2), Host: emulated.GPU{MemoryBytes: 64 << 20}}, nil)
	for path, param := range map[string]string{
		"/sleep?level=3": "level", "/sleep?level=": "level", "/sleep?level=1&level=2": "level", "/sleep?mode=nap": "mode", "/sleep?tags=weights": "tags",
		"/wake_up?tags=all": "tags", "/wake_up?level=1": "level",
	} {
		a := h.send(http.MethodPost, path, "")
		if _, _, p, _ := failed(t, a); a.status != http.StatusBadRequest || p != param {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
	u, err := m.Usage(device.Host)
	if err != nil {
		t.Fatal(err)
	}
	others, err := m.Alloc(device.Host, u.Free()-1000, "others")
	if err != nil {
		t.Fatal(err)
	}
	a := h.send(http.MethodPost, "/sleep", "")
	if message, _, _, code := failed(t, a); a.status != http.StatusServiceUnavailable || code != "out_of_memory" || !strings.Contains(message, "level 2") {
		t.Errorf("sleep without host memory: %d %s", a.status, a.body)
	}
	if h.node.Sleeping().Asleep() || h.node.Engine().State().Paused {
		t.Error("a failed sleep leaves the model asleep")
	}
	if err := others.Free(); err != nil {
		t.Fatal(err)
	}
	if a := h.send(http.MethodPost, "/sleep", ""); a.status != http.StatusOK {
		t.Fatalf("sleep: %d %s", a.status, a.body)
	}
	other, err := m.Alloc(device.HBM(0), 255<<20, "another process")
	if err != nil {
		t.Fatal(err)
	}
	a = h.send(http.MethodPost, "/wake_up", "")
	if _, _, _, code := failed(t, a); a.status != http.StatusServiceUnavailable || code != "out_of_memory" || a.header.Get("Retry-After") == "" {
		t.Errorf("wake without memory: %d %s", a.status, a.body)
	}
	if !h.node.Sleeping().Asleep() {
		t.Error("a failed wake leaves the model awake")
	}
	if err := other.Free(); err != nil {
		t.Fatal(err)
	}
	if a := h.send(http.MethodPost, "/wake_up", ""); a.status != http.StatusOK {
		t.Fatalf("wake: %d %s", a.status, a.body)
	}
	if got := decode[reply](t, h.post(completionsPath, completionBody(`"1+2="`, ""))).Choices; len(got) != 1 {
		t.Errorf("after the wake: %v", got)
	}
}
