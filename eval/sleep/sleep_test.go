package sleep_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/sleep"
)

// model is an engine whose sleeps take as long as it is told, and that knows whether another is
// awake.
type model struct {
	*testing.T
	name  string
	awake *string
	took  []float64 // of sleeps, in turn
	slept int
	spoil int // after so many wakes its tokens are others; 0: never
	wakes int
}

func (m *model) Info() sleep.Info { return sleep.Info{Model: m.name, DType: "bfloat16"} }

func (m *model) Tokens(context.Context) ([]int32, error) {
	if *m.awake != m.name {
		m.Errorf("%s generates while %q is awake", m.name, *m.awake)
	}
	if m.spoil > 0 && m.wakes >= m.spoil {
		return []int32{9}, nil
	}
	return []int32{1, 2}, nil
}

func (m *model) Sleep(_ context.Context, level int) (sleep.Phase, error) {
	if *m.awake != m.name {
		m.Errorf("%s is put to sleep while %q is awake", m.name, *m.awake)
	}
	*m.awake = ""
	s := m.took[m.slept%len(m.took)]
	m.slept++
	return sleep.Phase{Seconds: s, CopySeconds: s / 2, CopiedBytes: int64(level), GPUBytes: 2e9}, nil
}

func (m *model) Wake(context.Context) (sleep.Phase, error) {
	if *m.awake != "" {
		m.Errorf("%s is woken while %q is awake", m.name, *m.awake)
	}
	*m.awake = m.name
	m.wakes++
	return sleep.Phase{Seconds: 1, CopySeconds: 0.25, CopiedBytes: 1e9}, nil
}

// TestMeasure: medians, the first sleep by itself, and switches, with one model awake at a time.
func TestMeasure(t *testing.T) {
	awake := "a"
	a := &model{T: t, name: "a", awake: &awake, took: []float64{9, 1, 3, 2}}
	b := &model{T: t, name: "b", awake: &awake, took: []float64{5}}
	var r sleep.Result
	steps := int64(0)
	o := sleep.Options{Models: []sleep.Engine{a, b}, Levels: []int{1, 2}, Trials: 3, Progress: func(done, total int64) {
		if steps++; done != steps || done > total {
			t.Errorf("progress %d of %d at step %d", done, total, steps)
		}
	}}
	if err := sleep.Measure(t.Context(), o, &r); err != nil {
		t.Fatal(err)
	}
	if len(r.FirstSleeps) != 1 || r.FirstSleeps[0].Sleep.Seconds != 9 {
		t.Errorf("first sleeps: %+v", r.FirstSleeps)
	}
	if len(r.Points) != 4 || r.Points[0].Sleep.Seconds != 2 || len(r.Points[0].Trials) != 3 || r.Points[3].Level != 2 || r.Points[3].Model != "b" {
		t.Errorf("points: %+v", r.Points)
	}
	if len(r.Switches) != 2 || r.Switches[1].From != "b" || r.Switches[1].Seconds != 6 || r.Switches[1].CopyShare != 2.75/6 {
		t.Errorf("switches: %+v", r.Switches)
	}
	if p := r.Points[0]; p.Wake.CopyRate() != 4e9 || p.Wake.CopyShare() != 0.25 {
		t.Errorf("%+v: rate %v, share %v", p.Wake, p.Wake.CopyRate(), p.Wake.CopyShare())
	}
	var table strings.Builder
	if err := sleep.WriteTable(&table, &r); err != nil || !strings.Contains(table.String(), "1, first") || !strings.Contains(table.String(), "switch from") {
		t.Errorf("%v: %s", err, table.String())
	}
}

// TestMeasureRefuses: no models, no trials, and a model that is not what it was after a wake.
func TestMeasureRefuses(t *testing.T) {
	awake := "a"
	a := &model{T: t, name: "a", awake: &awake, took: []float64{1}, spoil: 2}
	for _, o := range []sleep.Options{{Trials: 1}, {Models: []sleep.Engine{a}}} {
		if err := sleep.Measure(t.Context(), o, &sleep.Result{}); !errors.Is(err, eval.ErrInput) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	err := sleep.Measure(t.Context(), sleep.Options{Models: []sleep.Engine{a}, Levels: []int{1}, Trials: 3}, &sleep.Result{})
	if err == nil || !strings.Contains(err.Error(), "tokens after a wake differ") {
		t.Errorf("a model whose tokens change: %v", err)
	}
}
