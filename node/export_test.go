package node

import (
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/harvest"
)

// Harvest is what the node borrows with, nil where it does not.
func (n *Node) Harvest() *harvest.Runtime { return n.harvest }

// Machine is what the node runs on.
func (n *Node) Machine() device.Machine { return n.machine }

// PresetOf is presetOf.
var PresetOf = presetOf
