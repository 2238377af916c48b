package sleep

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/eval"
)

// Phase is how long a sleep or a wake took. It has a JSON form.
type Phase struct {
	// Seconds is the time of the whole.
	Seconds float64 `json:"seconds"`
	// CopySeconds is that of copies of weights, PinSeconds that of the allocation of pinned host
	// memory, MapSeconds that of releasing the GPU's memory or getting it, and LoadSeconds that of
	// loading weights from the checkpoint.
	CopySeconds float64 `json:"copy_s"`
	PinSeconds  float64 `json:"pin_s"`
	MapSeconds  float64 `json:"map_s"`
	LoadSeconds float64 `json:"load_s"`
	// CopiedBytes were copied, and GPUBytes of the GPU's memory released, or gotten.
	CopiedBytes int64 `json:"copied_bytes"`
	GPUBytes    int64 `json:"gpu_bytes"`
}

// CopyShare is the share of the copies in the time, from 0 to 1.
func (p Phase) CopyShare() float64 { return ratio(p.CopySeconds, p.Seconds) }

// CopyRate is that of the copies, in bytes per second.
func (p Phase) CopyRate() float64 { return ratio(float64(p.CopiedBytes), p.CopySeconds) }

func ratio(a, b float64) float64 {
	if b <= 0 {
		return 0
	}
	return a / b
}

// Info describes an engine.
type Info struct {
	eval.Machine
	// Model and DType as a user knows them; OffloadFraction of its experts are offloaded.
	Model, DType    string
	OffloadFraction float64
}

// Engine is a model that can sleep.
type Engine interface {
	Info() Info
	// Tokens are those of a fixed request, nil where memory holds no bytes. The model is awake.
	Tokens(ctx context.Context) ([]int32, error)
	// Sleep at level 1 or 2, and Wake.
	Sleep(ctx context.Context, level int) (Phase, error)
	Wake(ctx context.Context) (Phase, error)
}

// Options of a measurement.
type Options struct {
	// Models share the devices. All sleep, at level 1, but for the first, which is awake.
	Models []Engine
	// Levels to measure.
	Levels []int
	// Trials of each measurement.
	Trials int
	// Asleep is how long a model sleeps before it wakes, of switches nothing: a driver may clear
	// memory behind the call that frees it, which delays who gets it next.
	Asleep time.Duration
	// Progress, unless nil, is called with the measurements that are done.
	Progress func(done, total int64)
}

// Point is what a model's sleep and wake at a level took: the median of the trials by the time of
// the whole.
type Point struct {
	Model           string  `json:"model"`
	DType           string  `json:"dtype"`
	OffloadFraction float64 `json:"offload_fraction"`
	Level           int     `json:"level"`
	Sleep           Phase   `json:"sleep"`
	Wake            Phase   `json:"wake"`
	// Trials are all of them, in order.
	Trials []Trial `json:"trials"`
}

// Trial is one sleep and the wake after it.
type Trial struct {
	Sleep Phase `json:"sleep"`
	Wake  Phase `json:"wake"`
}

// Switch is what a switch from one model to another took, at level 1: the median of the trials.
type Switch struct {
	From string `json:"from"`
	To   string `json:"to"`
	// Seconds is the time of the sleep and the wake, CopyShare that of copies in it.
	Seconds   float64 `json:"seconds"`
	CopyShare float64 `json:"copy_share"`
	Sleep     Phase   `json:"sleep"`
	Wake      Phase   `json:"wake"`
}

// Result of a measurement. It has a JSON form.
type Result struct {
	eval.Run
	eval.Machine
	// AsleepSeconds is how long models slept before they woke, apart from switches.
	AsleepSeconds float64 `json:"asleep_s"`
	// FirstSleeps are those at level 1 that allocate pinned host memory, by model, where one was
	// measured.
	FirstSleeps []Point  `json:"first_sleeps"`
	Points      []Point  `json:"points"`
	Switches    []Switch `json:"switches"`
}

// errTokens: the model is not what it was.
var errTokens = errors.New("the tokens after a wake differ from those before the sleep")

// Measure measures, and adds what is done to r, also where it returns an error.
func Measure(ctx context.Context, o Options, r *Result) error {
	if len(o.Models) == 0 || o.Trials < 1 {
		return fmt.Errorf("sleep: %w: %d models, %d trials", eval.ErrInput, len(o.Models), o.Trials)
	}
	r.Machine, r.AsleepSeconds = o.Models[0].Info().Machine, o.Asleep.Seconds()
	total, done := int64(len(o.Models)*len(o.Levels)), int64(0)
	if len(o.Models) > 1 {
		total += int64(len(o.Models) * o.Trials)
	}
	step := func() {
		if done++; o.Progress != nil {
			o.Progress(done, total)
		}
	}
	for i, m := range o.Models {
		if i > 0 {
			if _, err := m.Wake(ctx); err != nil {
				return err
			}
		}
		if err := measureModel(ctx, m, o, i == 0, r, step); err != nil {
			return fmt.Errorf("sleep: %s: %w", m.Info().Model, err)
		}
		if i+1 == len(o.Models) && i == 0 {
			return nil
		}
		if _, err := m.Sleep(ctx, 1); err != nil {
			return err
		}
	}
	if _, err := o.Models[0].Wake(ctx); err != nil {
		return err
	}
	return measureSwitches(ctx, o, r, step)
}

// measureModel measures a model that is awake, and leaves it awake. first: it has never slept.
func measureModel(ctx context.Context, m Engine, o Options, first bool, r *Result, step func()) error {
	want, err := m.Tokens(ctx)
	if err != nil {
		return err
	}
	cycle := func(level int) (t Trial, err error) {
		if t.Sleep, err = m.Sleep(ctx, level); err != nil {
			return t, err
		}
		select {
		case <-time.After(o.Asleep):
		case <-ctx.Done():
			return t, ctx.Err()
		}
		if t.Wake, err = m.Wake(ctx); err != nil {
			return t, err
		}
		got, err := m.Tokens(ctx)
		if err == nil && !slices.Equal(got, want) {
			err = errTokens
		}
		return t, err
	}
	i := m.Info()
	for _, level := range o.Levels {
		p := Point{Model: i.Model, DType: i.DType, OffloadFraction: i.OffloadFraction, Level: level}
		if first && level == 1 {
			t, err := cycle(level)
			if err != nil {
				return err
			}
			f := p
			f.Sleep, f.Wake, f.Trials = t.Sleep, t.Wake, []Trial{t}
			r.FirstSleeps = append(r.FirstSleeps, f)
		}
		for range o.Trials {
			t, err := cycle(level)
			if err != nil {
				return err
			}
			p.Trials = append(p.Trials, t)
		}
		p.Sleep, p.Wake = median(p.Trials, func(t Trial) Phase { return t.Sleep }), median(p.Trials, func(t Trial) Phase { return t.Wake })
		r.Points = append(r.Points, p)
		step()
	}
	return nil
}

// measureSwitches switches round, from each model to the next.
func measureSwitches(ctx context.Context, o Options, r *Result, step func()) error {
	all := make([][]Trial, len(o.Models))
	for range o.Trials {
		for i, m := range o.Models {
			next := o.Models[(i+1)%len(o.Models)]
			var t Trial
			var err error
			if t.Sleep, err = m.Sleep(ctx, 1); err != nil {
				return err
			}
			if t.Wake, err = next.Wake(ctx); err != nil {
				return err
			}
			all[i] = append(all[i], t)
			step()
		}
	}
	for i, trials := range all {
		whole := func(t Trial) Phase { return Phase{Seconds: t.Sleep.Seconds + t.Wake.Seconds} }
		s := Switch{
			From: o.Models[i].Info().Model, To: o.Models[(i+1)%len(o.Models)].Info().Model, Seconds: median(trials, whole).Seconds,
			Sleep: median(trials, func(t Trial) Phase { return t.Sleep }), Wake: median(trials, func(t Trial) Phase { return t.Wake }),
		}
		s.CopyShare = ratio(s.Sleep.CopySeconds+s.Wake.CopySeconds, s.Sleep.Seconds+s.Wake.Seconds)
		r.Switches = append(r.Switches, s)
	}
	return nil
}

// median is the phase of the trials that is in the middle by time.
func median(trials []Trial, of func(Trial) Phase) Phase {
	phases := make([]Phase, len(trials))
	for i, t := range trials {
		phases[i] = of(t)
	}
	return eval.PercentileFunc(phases, 50, func(a, b Phase) int { return cmp.Compare(a.Seconds, b.Seconds) })
}
