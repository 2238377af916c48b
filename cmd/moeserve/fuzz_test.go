package main

import (
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/untrusted"
)

// FuzzConfigFile reads foreign bytes as a configuration file: its values are of keys that exist,
// and its errors can be printed.
func FuzzConfigFile(f *testing.F) {
	for _, s := range []string{
		"offload-fraction: 0.5\nmodel: x\n", "# nothing\n", "port: &a 8000\nhost: *a\n", "a: [1, 2]", "- 1", "port: !!str 1", "---\n---\n",
		"model: |\n  x\n", "port: 0x1f\nport: 1", "null", "? {a: b}\n: c", "<<: {port: 1}",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		values, err := parseFile(data)
		if err != nil {
			if line := oneLine(err); line == "" || untrusted.Line(line) != line {
				t.Fatalf("%q: error %q", data, line)
			}
			return
		}
		for key := range values {
			if _, ok := configs.Find(key); !ok {
				t.Fatalf("%q: key %q", data, key)
			}
		}
	})
}
