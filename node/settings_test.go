package node

import (
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/harvest"
)

// The names that the setting harvest-policy may have are those of harvest's policies.
func TestHarvestPolicyNames(t *testing.T) {
	k, ok := configs.Find("harvest-policy")
	if !ok {
		t.Fatal("there is no setting harvest-policy")
	}
	for _, name := range k.Allowed {
		if p, err := harvest.NewPolicy(name, harvest.PolicyOptions{}); err != nil || p.Name() != name {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := harvest.NewPolicy("", harvest.PolicyOptions{})
	if err == nil || !strings.HasSuffix(err.Error(), " "+strings.Join(slices.Sorted(slices.Values(k.Allowed)), ", ")) {
		t.Errorf("the setting may be %v; harvest says %v", k.Allowed, err)
	}
}
