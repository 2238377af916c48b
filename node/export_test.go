package node

import "github.com/moeserve/moeserve/harvest"

// Harvest returns the runtime that borrows memory, nil without peers.
func (n *Node) Harvest() *harvest.Runtime { return n.harvest }
