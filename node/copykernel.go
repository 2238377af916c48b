package node

import (
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/transfer"
)

// copyKernel says where a kernel copies blocks of KV tiers, by --hardware; nil: nowhere.
func (u *setup) copyKernel() (*transfer.Kernel, error) {
	name := u.settings.Plan.Hardware
	if name == "" || !u.kvTiers.Enabled() {
		return nil, nil
	}
	h, err := planning.LoadHardware(name)
	if err != nil {
		return nil, err
	}
	return planning.CopyKernel(h, u.devices.Machine.Topology(), u.devices.Enqueuing(), u.kvSpace(), u.kvPeers), nil
}
