package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/harvest/reclaim"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/node/sleeping"
	"github.com/moeserve/moeserve/node/turns"
	"github.com/moeserve/moeserve/server"
)

// served is one of the models of a server.
type served struct {
	set      *settings
	names    []string
	defaults *sampling
	metrics  *server.Metrics
	node     *node.Node // nil until it is loaded
}

// severalModels has the flag --model of a command name a model each time that it is given.
func severalModels(cmd *cobra.Command) {
	cmd.Flags().Lookup(modelFlag).Value.(*flagValue).several = true
}

// servedSettings are those of a command whose arguments are models.
func servedSettings(cmd *cobra.Command, args []string) (*settings, error) {
	for _, name := range args {
		f := cmd.Flags().Lookup(modelFlag)
		if slices.Contains(modelList(f.Value.String()), name) {
			continue // named twice, as argument and as flag
		}
		if err := cmd.Flags().Set(modelFlag, name); err != nil {
			return nil, err
		}
	}
	return modelSettings(cmd, nil)
}

// modelList splits the setting model: several names are separated by commas. A path that exists is
// one name.
func modelList(name string) []string {
	if _, err := os.Stat(name); err == nil || !strings.Contains(name, ",") {
		return []string{name}
	}
	return strings.Split(name, ",")
}

// servedModels are the models of a server, each with settings of its own, which differ in the model
// alone.
func servedModels(set *settings) ([]*served, error) {
	list := modelList(set.Model.Name)
	names, err := set.Serve.ModelNames()
	if err != nil {
		return nil, err
	}
	if names != nil && len(list) > 1 && len(names) != len(list) {
		return nil, usagef("--served-model-name has %d names for %d models; give as many, in the order of the models", len(names), len(list))
	}
	var all []*served
	for i, name := range list {
		one := *set
		if one.Model.Name = expandHome(strings.TrimSpace(name)); one.Model.Name == checkpoint.BuiltIn {
			one.Model.Name = ""
		}
		if len(list) > 1 { // before the first is loaded; one model's node says it at once
			if err := one.Validate(); err != nil {
				return nil, usagef("%s: %w", name, err)
			}
		}
		m := &served{set: &one}
		switch {
		case names != nil && len(list) > 1:
			m.names = names[i : i+1]
		case names != nil:
			m.names = names
		default:
			own, err := modelName(&one)
			if err != nil {
				return nil, err
			}
			m.names = []string{own}
		}
		for _, o := range all {
			if o.names[0] == m.names[0] {
				return nil, usagef("two models are called %s; give each a name by --served-model-name NAME,NAME", m.names[0])
			}
		}
		m.metrics = server.NewMetrics(m.names[0])
		all = append(all, m)
	}
	for _, m := range all {
		if m.defaults, err = defaultSampling(m.set); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// openModels loads the models on the same devices. Only the first is awake at the end; the others
// sleep with their weights in host memory. The caller closes the nodes, also after an error. events gets their
// steps while somebody follows; nil: nobody does.
func openModels(ctx context.Context, s *streams, o node.Options, all []*served, events *server.Events) error {
	if len(all) > 1 {
		o.Share = &devices.Shared{}
	}
	for i, m := range slices.Backward(all) {
		one := o
		one.Settings, one.WithoutTokenizer = m.set.Settings, withoutTokenizer(m.set.Model.Name)
		one.Listener = engine.Listener{StepFinished: func(i engine.StepInfo) {
			m.metrics.ObserveStep(i)
			if events != nil && events.Followed() {
				events.Publish(observe.EngineStep, m.node.Observe().Step(i))
			}
		}}
		var err error
		if m.node, err = open(ctx, s, one, false); err != nil {
			return err
		}
		if i == 0 {
			return nil
		}
		if _, err := m.node.Sleep(ctx, sleeping.Copy, engine.PauseWait); err != nil {
			return fmt.Errorf("%s, which takes turns with %s, cannot sleep: %w", m.names[0], all[0].names[0], err)
		}
	}
	return nil
}

// closeModels closes what was loaded, the last first.
func closeModels(all []*served) (err error) {
	for _, m := range all {
		if m.node != nil {
			err = errors.Join(err, m.node.Close())
		}
	}
	return err
}

// newTurns has the models take turns; nil where there is one.
func newTurns(all []*served, turn time.Duration, srv *server.Server, log *slog.Logger) (runner *turns.Runner, err error) {
	if len(all) < 2 {
		return nil, nil
	}
	t := server.NewTurns(func() any { return runner.State() })
	o := turns.Options{Limits: turns.Limits{Turn: turn}, Log: log, Switched: func(took turns.Took) { t.ObserveSwitch(took.Total, took.Copies) }}
	for _, m := range all {
		o.Models, o.Names = append(o.Models, m.node.Turn()), append(o.Names, m.names[0])
	}
	if runner, err = turns.NewRunner(o); err == nil {
		srv.SetTurns(t)
	}
	return runner, err
}

// inTurns is an engine whose model takes turns with others.
type inTurns struct {
	server.Engine
	runner *turns.Runner
}

// Submit implements server.Engine.
func (e inTurns) Submit(ctx context.Context, r engine.Request) (*engine.Job, error) {
	j, err := e.Engine.Submit(ctx, r)
	e.runner.Notify()
	return j, err
}

// models are what the server is to know of the nodes.
func models(all []*served, runner *turns.Runner) []*server.Model {
	var of []*server.Model
	for _, m := range all {
		x := model(m.names, m.defaults, &m.set.Serve, m.node)
		x.Metrics = m.metrics
		if runner != nil {
			x.Engine, x.Sleeper = inTurns{x.Engine, runner}, nil
			if x.Harvest != nil {
				x.Harvest = awakeHarvest(all)
			}
		}
		of = append(of, x)
	}
	return of
}

// awakeHarvest serves requests for borrowed memory by the model that is awake, which alone borrows any.
func awakeHarvest(all []*served) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		at := slices.IndexFunc(all, func(m *served) bool { return !m.node.Sleeping().Asleep() })
		reclaim.Handler(all[max(at, 0)].node.Lender()).ServeHTTP(w, r)
	})
}

// runModels runs the engines of all models, and their turns, until ctx is done or an engine fails,
// which failed is told.
func runModels(ctx context.Context, all []*served, runner *turns.Runner, failed func(error)) error {
	running, stop := context.WithCancel(ctx)
	defer stop()
	turned := make(chan struct{})
	go func() {
		if runner != nil {
			runner.Run(running)
		}
		close(turned)
	}()
	ends := make(chan error, len(all))
	for _, m := range all {
		go func() {
			err := m.node.Engine().Run(running)
			if err != nil {
				failed(err)
			}
			stop()
			ends <- err
		}()
	}
	var err error
	for range all {
		err = errors.Join(err, <-ends)
	}
	<-turned
	return err
}
