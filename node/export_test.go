package node

import (
	"context"

	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/harvest/reclaim"
	"github.com/moeserve/moeserve/rebalancer/lending"
)

// Harvest returns the runtime that borrows memory, nil without peers.
func (n *Node) Harvest() *harvest.Runtime { return n.harvest }

// ExchangeShares has a node ask the processes in a directory, other than except, once what they
// have borrowed.
func ExchangeShares(ctx context.Context, n *Node, dir, except string) error {
	return n.lender.exchange(ctx, reclaim.Client{Dir: dir, Except: except})
}

// KVLender returns what lends memory of the KV cache.
func (n *Node) KVLender() *lending.Lender { return n.memory }

// Store returns the experts.
func (n *Node) Store() *experts.Store { return n.store }

// Exposure returns a function for what lending is told of a node: for how many seconds compute has
// waited for experts, and how long these have taken of the link.
func Exposure(n *Node) func() (waited, copied float64) {
	var x expertTime
	return func() (float64, float64) { return x.waited(n), x.copied(n) }
}
