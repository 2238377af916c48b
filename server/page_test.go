package server_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// TestDebugNode: what the node says it does, as its page reads it.
func TestDebugNode(t *testing.T) {
	h := start(t, options{})
	h.post("/v1/completions", `{"prompt": "1+2=", "max_tokens": 3, "ignore_eos": true}`)
	var n struct {
		Model string
		Now   struct {
			Backend   string
			Steps     int
			Generated int `json:"generated_tokens"`
			Memories  []struct {
				Space     string
				Allocated int64 `json:"allocated_bytes"`
			}
			Stalls map[string]float64
			Links  []struct {
				Src, Dst  string
				Bytes     int64
				ByPurpose map[string]int64 `json:"bytes_by_purpose"`
			}
		}
	}
	if err := json.Unmarshal([]byte(h.send(http.MethodGet, "/debug/node", "").body), &n); err != nil {
		t.Fatal(err)
	}
	if n.Model != "tiny" || n.Now.Backend != "cpu" || n.Now.Steps < 3 || n.Now.Generated != 3 || len(n.Now.Memories) < 2 || len(n.Now.Stalls) == 0 {
		t.Errorf("%+v", n)
	}
	if !slices.ContainsFunc(n.Now.Memories, func(m struct {
		Space     string
		Allocated int64 `json:"allocated_bytes"`
	},
	) bool {
		return m.Space == "gpu0" && m.Allocated > 0
	}) {
		t.Errorf("nothing is allocated on the GPU: %+v", n.Now.Memories)
	}
	if len(n.Now.Links) == 0 {
		t.Error("no link has copied the weights")
	}
	for _, l := range n.Now.Links {
		var bytes int64
		for _, n := range l.ByPurpose {
			bytes += n
		}
		if bytes != l.Bytes || l.Dst == "gpu0" && l.ByPurpose["demand"] == 0 {
			t.Errorf("%s to %s: %d bytes, for %v", l.Src, l.Dst, l.Bytes, l.ByPurpose)
		}
	}
	if a := h.send(http.MethodGet, "/debug/node?model=other", ""); a.status != http.StatusNotFound || !strings.Contains(a.body, "other") {
		t.Errorf("%d %s", a.status, a.body)
	}
}
