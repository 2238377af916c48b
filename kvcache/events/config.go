package events

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// The publishers.
const (
	Null = "null"
	ZMQ  = "zmq"
)

// Config is vLLM's --kv-events-config; the names in parentheses are its keys.
type Config struct {
	// Enabled (enable_kv_cache_events).
	Enabled bool `json:"enable_kv_cache_events"`
	// Publisher (publisher) is ZMQ or Null, which drops all. Default: ZMQ.
	Publisher string `json:"publisher"`
	// Endpoint (endpoint) of the PUB socket. One with a *, a [::] or ipc:// is bound, others are connected to, as
	// by vLLM; with a leading @ or > it is bound or connected to whatever it is. Default: tcp://*:5557.
	Endpoint string `json:"endpoint"`
	// ReplayEndpoint (replay_endpoint) of the ROUTER socket that sends kept batches again. It is bound.
	// Default: none.
	ReplayEndpoint string `json:"replay_endpoint"`
	// BufferSteps (buffer_steps) is the number of batches that are kept. Default: 10,000.
	BufferSteps int `json:"buffer_steps"`
	// HWM (hwm) is the number of kept batches by which a subscriber may be behind. Default: 100,000.
	HWM int `json:"hwm"`
	// MaxQueueSize (max_queue_size) is the number of batches that wait for being encoded. Default: 100,000.
	MaxQueueSize int `json:"max_queue_size"`
	// Topic (topic) of all messages. Default: kv@HOST@MODEL.
	Topic string `json:"topic"`
}

// EnsureDefaults returns c with its defaults set.
func (c Config) EnsureDefaults() Config {
	if c.Publisher == "" {
		c.Publisher = ZMQ
	}
	if c.Endpoint == "" {
		c.Endpoint = "tcp://*:5557"
	}
	if c.BufferSteps == 0 {
		c.BufferSteps = 10_000
	}
	if c.HWM == 0 {
		c.HWM = 100_000
	}
	if c.MaxQueueSize == 0 {
		c.MaxQueueSize = 100_000
	}
	return c
}

// Validate reports the first invalid value.
func (c Config) Validate() error {
	c = c.EnsureDefaults()
	if c.Publisher != ZMQ && c.Publisher != Null {
		return fmt.Errorf("publisher is %q; it must be %q or %q", c.Publisher, ZMQ, Null)
	}
	if _, err := parseEndpoint(c.Endpoint); err != nil {
		return fmt.Errorf("endpoint is %q; %w", c.Endpoint, err)
	}
	if c.ReplayEndpoint != "" {
		e, err := parseEndpoint(c.ReplayEndpoint)
		if err != nil {
			return fmt.Errorf("replay_endpoint is %q; %w", c.ReplayEndpoint, err)
		}
		if e == c.endpoint() && !strings.HasSuffix(e.address, ":0") {
			return fmt.Errorf("replay_endpoint is %q, as is endpoint; they must be two", c.ReplayEndpoint)
		}
	}
	for _, f := range []struct {
		key   string
		value int
	}{{"buffer_steps", c.BufferSteps}, {"hwm", c.HWM}, {"max_queue_size", c.MaxQueueSize}} {
		if f.value < 1 || f.value > 10_000_000 {
			return fmt.Errorf("%s is %d; it must be from 1 to 10,000,000", f.key, f.value)
		}
	}
	if len(c.Topic) > 255 {
		return fmt.Errorf("topic has %d bytes; it must have at most 255", len(c.Topic))
	}
	return nil
}

// endpoint is the parsed Endpoint, which is valid.
func (c Config) endpoint() endpoint {
	e, _ := parseEndpoint(c.Endpoint)
	return e
}

// ParseConfig reads the JSON of --kv-events-config. Unknown keys and invalid values are errors that name them.
func ParseConfig(text []byte) (Config, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	var c Config
	err := d.Decode(&c)
	if err == nil {
		if _, behind := d.Token(); !errors.Is(behind, io.EOF) {
			err = errors.New("unexpected text behind the JSON value")
		}
	}
	if err == nil {
		err = c.Validate()
	}
	if err != nil {
		return Config{}, fmt.Errorf("--kv-events-config: %w; its keys are enable_kv_cache_events, publisher, endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size and topic", err)
	}
	return c, nil
}

// endpoint is a parsed endpoint.
type endpoint struct {
	network, address string // as package net has them
	bind             bool
}

func parseEndpoint(text string) (endpoint, error) {
	rest := strings.TrimLeft(text, "@>")
	scheme, address, ok := strings.Cut(rest, "://")
	e := endpoint{address: address, bind: strings.Contains(address, "*") || strings.Contains(address, "::") || scheme == "ipc"}
	switch {
	case !ok || len(text)-len(rest) > 1 || scheme != "tcp" && scheme != "ipc":
		return e, errors.New("it must be tcp://HOST:PORT or ipc://PATH")
	case text[0] == '@':
		e.bind = true
	case text[0] == '>':
		e.bind = false
	}
	if scheme == "ipc" {
		e.network = "unix"
		if address == "" {
			return e, errors.New("it must have a path behind ipc://")
		}
		return e, nil
	}
	e.network = "tcp"
	at := strings.LastIndexByte(address, ':')
	if at < 0 {
		return e, errors.New("it must have a port, as tcp://*:5557")
	}
	host, port := address[:at], address[at+1:]
	if host == "*" {
		host = ""
	}
	if port == "*" {
		port = "0"
	}
	if strings.Contains(host, "*") || host == "" && !e.bind {
		return e, fmt.Errorf("%q is no host", address[:at])
	}
	e.address = host + ":" + port
	return e, nil
}
