package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/server"
	"github.com/moeserve/moeserve/untrusted"
)

const logLevelKey = "log-level"

// stateKey is the member of Values that has the state of the models. It is no setting.
const stateKey = "state"

// liveKeys are the settings that can change while a server runs.
func liveKeys() []string { return append(node.Changeable(), node.OffloadFractionKey, logLevelKey) }

// atStart says of settings that cannot change while a server runs what to do instead; of all others it
// is said to start again.
var atStart = map[string]string{
	"resident-experts": "cannot change while the model runs; start again with it, or with --dynamic-residency, which swaps resident experts by use",
	"model":            "cannot change while the server runs; start again with it, or with several --model, which take turns",
}

// live are the settings of a running server that change on its admin address.
type live struct {
	log   *slog.Logger
	level *slog.LevelVar

	mu sync.Mutex
	// started are the settings that the server was started with, values those that can change, by key,
	// as flags have them.
	started configs.Settings
	values  map[string]any
	// nodes that have them; none until the models are loaded. offload are their offload fractions.
	nodes   []*node.Node
	offload *offloadTargets
}

var _ server.Settings = (*live)(nil)

func newLive(set *configs.Settings, level *slog.LevelVar, log *slog.Logger) *live {
	l := &live{log: log, level: level, started: *set, values: map[string]any{}}
	all := set.Values()
	for _, key := range liveKeys() {
		if key != node.OffloadFractionKey {
			l.values[key] = all[key]
		}
	}
	return l
}

// serving has changes take effect on the models, which are loaded.
func (l *live) serving(models []*served) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range models {
		l.nodes = append(l.nodes, m.node)
	}
	l.offload = newOffloadTargets(models)
}

// Values implements server.Settings.
func (l *live) Values() map[string]any {
	l.mu.Lock()
	defer l.mu.Unlock()
	values := maps.Clone(l.values)
	values[node.OffloadFractionKey] = l.offload.value()
	values[stateKey] = l.offload.state()
	return values
}

// Change implements server.Settings.
func (l *live) Change(values map[string]json.RawMessage) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	to, offload := maps.Clone(l.values), l.offload.values
	var keys []string // that change
	for _, key := range slices.Sorted(maps.Keys(values)) {
		switch key {
		case stateKey: // as Values has it
			continue
		case node.OffloadFractionKey:
			var err error
			if offload, err = l.offload.parse(values[key]); err != nil {
				return err
			}
			continue
		}
		v, err := liveValue(key, values[key])
		if err != nil {
			return err
		}
		if v != to[key] {
			to[key], keys = v, append(keys, key)
		}
	}
	started := l.started
	if err := started.Put(to); err != nil {
		return refusedSetting(err)
	}
	ofNode := slices.DeleteFunc(slices.Clone(keys), func(key string) bool { return key == logLevelKey })
	settings := make([]configs.Settings, len(l.nodes))
	for i, n := range l.nodes {
		settings[i] = n.Info().Settings
		if err := settings[i].Put(to); err != nil {
			return refusedSetting(err)
		}
		if err := n.CanChange(&settings[i], ofNode...); err != nil {
			return refusedSetting(err)
		}
	}
	for i, n := range l.nodes {
		if err := n.Change(&settings[i], ofNode...); err != nil {
			return fmt.Errorf("some settings may have changed, others not: %w", err)
		}
	}
	if err := l.offload.set(offload, l.log); err != nil {
		return fmt.Errorf("some settings may have changed, others not: %w", err)
	}
	level := started.Output.LogLevel.Level()
	l.level.Set(min(level, l.level.Level())) // a change to fewer messages is a message, too
	for _, key := range keys {
		l.log.Info("setting changed", "setting", key, "from", fmt.Sprint(l.values[key]), "to", fmt.Sprint(to[key]))
	}
	l.level.Set(level)
	l.values = to
	return nil
}

// liveValue is the value of a setting that can change.
func liveValue(key string, raw json.RawMessage) (any, error) {
	k, ok := configs.Find(key)
	switch {
	case !ok:
		return nil, &server.RefusedError{Name: key, Unknown: true, Err: fmt.Errorf("there is no setting %s; those that can change while the server runs are %s", untrusted.Line(key), strings.Join(liveKeys(), ", "))}
	case !slices.Contains(liveKeys(), key):
		why := atStart[key]
		if why == "" {
			why = "cannot change while the server runs; start again with it"
		}
		return nil, &server.RefusedError{Name: key, Err: fmt.Errorf("--%s %s; those that can change are %s", key, why, strings.Join(liveKeys(), ", "))}
	}
	var text string
	var given any
	_ = json.Unmarshal(raw, &given) // which the server has checked to be valid
	switch x := given.(type) {
	case string:
		text = x
	case float64:
		text = string(raw)
	default:
		return nil, &server.RefusedError{Name: key, Err: fmt.Errorf("--%s is %s: must be a string or a number, as on the command line", key, untrusted.Line(string(raw)))}
	}
	v, err := parse(k, text)
	if err == nil && k.Allowed != nil && !slices.Contains(k.Allowed, text) {
		err = fmt.Errorf("must be one of %s", strings.Join(k.Allowed, ", "))
	}
	if err != nil {
		return nil, &server.RefusedError{Name: key, Err: fmt.Errorf("--%s is %q: %w", key, text, err)}
	}
	if key == logLevelKey && v == configs.LogAuto.String() {
		v = configs.LogInfo.String()
	}
	return v, nil
}

// refusedSetting is err as the server has it.
func refusedSetting(err error) error {
	var refused *configs.SettingError
	if errors.As(err, &refused) {
		return &server.RefusedError{Name: refused.Key, Err: err}
	}
	return err
}
