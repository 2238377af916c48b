package node

import (
	"fmt"
	"os"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/kvcache/events"
	"github.com/moeserve/moeserve/node/fault"
)

// kvEvents is the configuration of KV events by the settings.
func kvEvents(s *configs.Settings, tiers bool) (c events.Config, err error) {
	if s.KV.EventsConfig == "" {
		return c, nil
	}
	if c, err = events.ParseConfig([]byte(s.KV.EventsConfig)); err != nil {
		return c, err
	}
	if c.Enabled && !s.KV.EnablePrefixCaching && !tiers {
		return c, fmt.Errorf("--kv-events-config enables events, and there are none without the prefix cache; leave out --no-enable-prefix-caching")
	}
	return c, nil
}

// openKVEvents opens the publisher of KV events, if there is one, for an engine.
func (n *Node) openKVEvents(u *setup, o *engine.Options) (err error) {
	if !u.kvEvents.Enabled {
		return nil
	}
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	n.events, err = events.Open(events.Options{
		Config: u.kvEvents, Topic: fmt.Sprintf("kv@%s@%s", host, n.info.Name), BlockTokens: n.kv.BlockTokens(), Log: n.log,
	})
	if err != nil {
		return fault.Of(fault.ErrConfig, err)
	}
	n.started(n.events.Close)
	for _, a := range n.events.Addrs() {
		n.log.Info("KV events", "address", a, "topic", n.events.Topic())
	}
	o.KVEvents = n.events.Publish
	return nil
}

// KVEvents is the publisher of KV events; nil: there is none.
func (n *Node) KVEvents() *events.Publisher { return n.events }
