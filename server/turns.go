package server

import (
	"net/http"
	"time"

	"github.com/moeserve/moeserve/metrics"
)

// Turns are how models that share a GPU take turns.
type Turns struct {
	state            func() any
	switches, copies *metrics.Histogram
}

// switchBounds are in seconds: from the switch of small models to that of ones whose weights come
// from a disk.
var switchBounds = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 50, 100}

// NewTurns makes them; state returns how they stand, as a value with a JSON form.
func NewTurns(state func() any) *Turns {
	return &Turns{
		state:    state,
		switches: metrics.NewHistogram(metrics.NewDesc("moeserve_model_switch_seconds", "Switch from one model to another: its sleep and the other's wake, without the wait for running requests."), switchBounds),
		copies:   metrics.NewHistogram(metrics.NewDesc("moeserve_model_switch_copy_seconds", "The part of a switch from one model to another in which weights are copied."), switchBounds),
	}
}

// ObserveSwitch counts a switch from one model to another, in copies of which weights were copied.
func (t *Turns) ObserveSwitch(took, copies time.Duration) {
	t.switches.Observe(took.Seconds())
	t.copies.Observe(copies.Seconds())
}

// SetTurns tells that models take turns.
func (s *Server) SetTurns(t *Turns) { s.turned.Store(t) }

// turns writes how models take turns.
func (s *Server) turns(w *response, _ *http.Request) error {
	t := s.turned.Load()
	if t == nil {
		return &Error{Status: http.StatusNotFound, Type: invalidRequest, Code: "unknown_url", Message: "This server has one model, which takes no turns."}
	}
	w.json(http.StatusOK, t.state())
	return nil
}
