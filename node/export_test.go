package node

import "github.com/moeserve/moeserve/harvest"

// Harvest is what the node borrows with, nil where it does not.
func (n *Node) Harvest() *harvest.Runtime { return n.harvest }
