package node

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/node/sizing"
)

// Settings that can change while a node runs, by key.
const (
	HeadroomKey       = "harvest-headroom"
	MigrationLimitKey = "migration-limit"
	PeersKey          = "peers"
)

// Changeable lists the settings that Change changes.
func Changeable() []string { return []string{HeadroomKey, MigrationLimitKey, PeersKey} }

// CanChange returns an error, a *configs.SettingError, where Change cannot change these settings, by
// key, to their values in to.
func (n *Node) CanChange(to *configs.Settings, keys ...string) error {
	if err := to.Validate(); err != nil {
		return err
	}
	refuse := func(key, format string, args ...any) error {
		return &configs.SettingError{Key: key, Value: to.Values()[key], Want: fmt.Sprintf(format, args...)}
	}
	for _, key := range keys {
		switch key {
		case HeadroomKey:
			if n.harvest == nil {
				return refuse(key, "cannot change, as no memory is borrowed; start again with --peers")
			}
		case MigrationLimitKey:
			if n.balance == nil {
				return refuse(key, "cannot change, as no expert migrates; start again with --peers or --dynamic-residency")
			}
		case PeersKey:
			choice, err := to.Device.ParsePeers()
			if err != nil {
				return err
			}
			if choice.Auto && n.harvest == nil {
				return refuse(key, "cannot change, as no memory is borrowed; start again with --peers")
			}
			for _, gpu := range choice.GPUs {
				if _, ok := n.lenders[gpu]; !ok {
					var have []string
					for _, at := range slices.Sorted(maps.Keys(n.lenders)) {
						have = append(have, strconv.Itoa(at))
					}
					return refuse(key, "names GPU %d; only GPUs that were peers at the start can be, %s: start again with --peers for others", gpu, strings.Join(have, ", "))
				}
			}
		default:
			return refuse(key, "cannot change while the model runs; start again with it")
		}
	}
	return nil
}

// Change changes these settings, by key, to their values in to: all of them, or none where CanChange
// returns an error. Requests run on. What is revoked by that is released soon, as peers' memory is
// when others need it; with peers, auto means those of the start.
func (n *Node) Change(to *configs.Settings, keys ...string) error {
	if err := n.CanChange(to, keys...); err != nil {
		return err
	}
	for _, key := range keys {
		var err error
		switch key {
		case HeadroomKey:
			err = n.setHeadroom(to)
		case MigrationLimitKey:
			var limit float64
			if limit, err = to.Harvest.ParseMigrationLimit(); err == nil {
				n.balance.SetMigrationLimit(limit)
			}
		case PeersKey:
			err = n.setPeers(to)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (n *Node) setHeadroom(to *configs.Settings) error {
	room, err := to.Harvest.ParseHeadroom()
	if err != nil {
		return err
	}
	for _, s := range n.lenders {
		if err := n.harvest.SetHeadroom(s, sizing.Headroom(room, n.machine.Topology(), s)); err != nil {
			return err
		}
	}
	return nil
}

func (n *Node) setPeers(to *configs.Settings) error {
	choice, err := to.Device.ParsePeers()
	if err != nil {
		return err
	}
	for gpu, s := range n.lenders {
		if err := n.harvest.Withdraw(s, !choice.Auto && !slices.Contains(choice.GPUs, gpu)); err != nil {
			return err
		}
	}
	return nil
}

// lendersOf are the GPUs whose memory may be borrowed, by the driver's numbers.
func lendersOf(u *setup) map[int]device.Space {
	all := map[int]device.Space{}
	for _, s := range u.lending() {
		all[u.devices.Number(s)] = s
	}
	return all
}
