package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/server"
	"github.com/moeserve/moeserve/untrusted"
)

// offloadTargets are the offload fractions of a running server's models, each a number or
// node.AutoOffload.
type offloadTargets struct {
	models []*served
	values []any
}

// newOffloadTargets are those of the start.
func newOffloadTargets(models []*served) *offloadTargets {
	o := &offloadTargets{models: models}
	for _, m := range models {
		switch set, at := m.node.Info().Settings, m.node.Offloading(); {
		case at.Extents > 0:
			o.values = append(o.values, node.AutoOffload)
		case set.Offload.ResidentExperts != "":
			o.values = append(o.values, at.Highest)
		default:
			o.values = append(o.values, set.Offload.Fraction)
		}
	}
	return o
}

// value is the one that all models have, or an object with each model's.
func (o *offloadTargets) value() any {
	if all := slices.Compact(slices.Clone(o.values)); len(all) == 1 {
		return all[0]
	}
	each := map[string]any{}
	for i, m := range o.models {
		each[m.names[0]] = o.values[i]
	}
	return each
}

// liveState is what a running server has come to by its settings. It has a JSON form.
type liveState struct {
	Models []modelState `json:"models"`
}

// modelState is that of a model.
type modelState struct {
	Model string `json:"model"`
	node.Offloading
}

// state takes stock. It may be called while requests run.
func (o *offloadTargets) state() liveState {
	var s liveState
	for _, m := range o.models {
		s.Models = append(s.Models, modelState{m.names[0], m.node.Offloading()})
	}
	return s
}

// parse reads a value for all models, or an object of some models' values. null is auto. It returns all
// values as they would be, having checked that each that changes can.
func (o *offloadTargets) parse(raw json.RawMessage) ([]any, error) {
	to := slices.Clone(o.values)
	var each map[string]json.RawMessage
	if json.Unmarshal(raw, &each) != nil || each == nil { // not an object
		v, err := offloadTarget(raw)
		if err != nil {
			return nil, err
		}
		for i := range to {
			to[i] = v
		}
	}
	for _, name := range slices.Sorted(maps.Keys(each)) {
		i := slices.IndexFunc(o.models, func(m *served) bool { return slices.Contains(m.names, name) })
		if i < 0 {
			return nil, refusedTarget("--%s is for %s, which is no model of this server; its models are %s", node.OffloadFractionKey, untrusted.Line(name), strings.Join(o.names(), ", "))
		}
		v, err := offloadTarget(each[name])
		if err != nil {
			return nil, err
		}
		to[i] = v
	}
	for i, m := range o.models {
		if to[i] == o.values[i] {
			continue
		}
		if err := m.node.CanOffload(fraction(to[i])); err != nil {
			if len(o.models) > 1 {
				err = fmt.Errorf("%s: %w", m.names[0], err)
			}
			return nil, refusedSetting(err)
		}
	}
	return to, nil
}

// set changes values that parse has returned.
func (o *offloadTargets) set(to []any, log *slog.Logger) error {
	for i, m := range o.models {
		if to[i] == o.values[i] {
			continue
		}
		if err := m.node.SetOffloadFraction(fraction(to[i])); err != nil {
			return err
		}
		log.Info("setting changed", "setting", node.OffloadFractionKey, "model", m.names[0], "from", fmt.Sprint(o.values[i]), "to", fmt.Sprint(to[i]))
		o.values[i] = to[i]
	}
	return nil
}

func (o *offloadTargets) names() (all []string) {
	for _, m := range o.models {
		all = append(all, m.names[0])
	}
	return all
}

// fraction is the target of a value, nil: none.
func fraction(value any) *float64 {
	if f, ok := value.(float64); ok {
		return &f
	}
	return nil
}

// offloadTarget reads the value of one model.
func offloadTarget(raw json.RawMessage) (any, error) {
	var given any
	_ = json.Unmarshal(raw, &given) // which the server has checked to be valid
	text := string(raw)
	switch x := given.(type) {
	case nil:
		return node.AutoOffload, nil
	case string:
		text = x
	case float64:
	default:
		return nil, refusedTarget("--%s is %s: must be a fraction from 0 to 1, auto or null, or an object of these by model", node.OffloadFractionKey, untrusted.Line(text))
	}
	if text == node.AutoOffload {
		return text, nil
	}
	k, _ := configs.Find(node.OffloadFractionKey)
	v, err := parse(k, text)
	if err != nil {
		return nil, refusedTarget("--%s is %q: must be a fraction from 0 to 1, as 0.25 or 25%%, or auto", node.OffloadFractionKey, text)
	}
	return v, nil
}

func refusedTarget(format string, args ...any) error {
	return &server.RefusedError{Name: node.OffloadFractionKey, Err: fmt.Errorf(format, args...)}
}
