package node

import (
	"context"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node/sleeping"
	"github.com/moeserve/moeserve/node/turns"
)

// Turn is the node as one of several that take turns on the same devices. While it sleeps its weights are in
// host memory.
func (n *Node) Turn() turns.Model { return turn{n} }

type turn struct{ n *Node }

// Load implements turns.Model.
func (t turn) Load() turns.Load {
	s := t.n.engine.State()
	return turns.Load{Running: s.Running, Waiting: s.Waiting}
}

// Sleep implements turns.Model.
func (t turn) Sleep(ctx context.Context, hurry <-chan struct{}) (turns.Took, error) {
	slept, hurried := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(hurried)
		select {
		case <-hurry:
			_ = t.n.engine.Pause(ctx, engine.PauseKeep) // the pause below has the same end
		case <-slept:
		}
	}()
	times, err := t.n.Sleep(ctx, sleeping.Copy, engine.PauseWait)
	close(slept)
	<-hurried
	if !t.n.Sleeping().Asleep() {
		t.n.engine.Resume() // the hurry may have come after the end of the other pause
	} else if err != nil {
		t.n.log.Warn("a part of the memory of a sleeping model was not released", "model", t.n.info.Name, "err", err)
		err = nil
	}
	return turns.Took{Total: times.Total, Copies: times.Copies}, err
}

// Wake implements turns.Model.
func (t turn) Wake(ctx context.Context) (turns.Took, error) {
	times, err := t.n.Wake(ctx)
	return turns.Took{Total: times.Total, Copies: times.Copies}, err
}
