package main

import (
	"strings"
	"testing"
)

// TestPackagedConfiguration: the configuration that packages install is valid.
func TestPackagedConfiguration(t *testing.T) {
	out, errs, code := invoke(t, strings.NewReader(""), "config", "--config", "../../deploy/systemd/moeserve.yaml")
	if code != 0 || strings.Count(out, "deploy/systemd/moeserve.yaml") < 5 {
		t.Errorf("exit code %d: %s%s", code, out, errs)
	}
}
