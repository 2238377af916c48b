package node

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// hint has the flags of a misfit's advice, and the tokens of KV cache that it promises.
var hint = regexp.MustCompile(`--offload-fraction ([0-9.e-]+)((?: --[a-z-]+ [a-z0-9]+)*)(?: in place of --[a-z-]+)? \(which leaves .*?(?:, ([0-9]+) tokens|of ([0-9]+) tokens|(override))`)

// follow puts the advice of an error into settings, and returns the promised tokens: 0 where
// it promises a number of blocks.
func follow(t *testing.T, s configs.Settings, text string) (configs.Settings, int) {
	t.Helper()
	m := hint.FindStringSubmatch(text)
	if m == nil {
		t.Fatalf("no fraction in %q", text)
	}
	number := func(text string) int {
		n, _ := strconv.Atoi(text)
		return n
	}
	values := map[string]any{}
	flags := strings.Fields(m[2])
	for i := 0; i < len(flags); i += 2 {
		key := strings.TrimPrefix(flags[i], "--")
		values[key] = any(flags[i+1])
		if n := number(flags[i+1]); n > 0 {
			values[key] = n
		}
	}
	fraction, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	values["offload-fraction"] = fraction
	s.Offload.ResidentExperts = ""
	if err := s.Put(values); err != nil {
		t.Fatal(err)
	}
	return s, number(m[3]) + number(m[4])
}

func inspected(t *testing.T, s configs.Settings) *Inspection {
	t.Helper()
	in, err := Inspect(Options{Settings: s})
	if err != nil {
		t.Fatal(err)
	}
	return in
}

// A model that does not fit does with the fraction of the error, and with the promised
// context; with one expert less offloaded it has not. --policy auto fits where it is named.
func TestAdviceFits(t *testing.T) {
	racedetector.SkipSequential(t)
	for _, c := range []struct {
		name, model, emulate string
		change               func(*configs.Settings)
		// context that is promised: the model's, unless there is no room for it.
		context int
		// minimal: the fraction is the minimum for the context.
		minimal bool
	}{
		{"built-in", "", "hbm=18MiB,host=1GiB", nil, 256, true},
		{"fewer tokens a step", "", "hbm=12MiB,host=1GiB", nil, 256, true},
		{"little memory", "", "hbm=6MiB,host=1GiB", nil, 256, true},
		{"dynamic residency", "", "hbm=18MiB,host=1GiB", func(s *configs.Settings) { s.Offload.DynamicResidency = true }, 256, true},
		{"long sequences", "", "hbm=18MiB,host=1GiB", func(s *configs.Settings) { s.KV.MaxModelLen = 200 }, 200, true},
		{"attention on the CPU", "", "hbm=18MiB,host=1GiB", func(s *configs.Settings) { s.Batch.Attention = configs.OnCPU }, 256, true},
		{"a KV cache that is too small", "", "hbm=21100KiB,host=1GiB", func(s *configs.Settings) { s.KV.MaxModelLen = 256 }, 256, true},
		{"blocks", "", "hbm=22MiB,host=1GiB", func(s *configs.Settings) { s.KV.NumGPUBlocksOverride = 30 }, 0, false},
		{"named experts", "", "hbm=18MiB,host=1GiB", func(s *configs.Settings) { s.Offload.ResidentExperts = "0:0-7;1:0-7;2:0-7;3:0-7;4:0-7" }, 256, true},
		{"host memory", "", "hbm=64MiB,host=38MiB", func(s *configs.Settings) { s.Offload.Fraction = 0.95 }, 256, false},
		{"peers", "", "hbm=128MiB,host=1GiB", func(s *configs.Settings) {
			s.Offload.Fraction, s.Offload.Tier, s.Harvest.Headroom = 1, configs.PeerTier, "127MiB"
		}, 256, false},
		{"peers, and little for the KV cache", "", "hbm=16MiB,host=1GiB", func(s *configs.Settings) {
			s.Offload.Fraction, s.Offload.Tier, s.Harvest.Headroom = 1, configs.PeerTier, "14MiB"
		}, 256, false},
		{"peers and the GPU", "", "hbm=18MiB,host=1GiB", func(s *configs.Settings) { s.Offload.Tier, s.Harvest.Headroom = configs.PeerTier, "17MiB" }, 256, true},
		{"mixtral-8x7b", "mixtral-8x7b", "hbm=24GiB,host=128GiB,nodata,virtual", nil, 32768, true},
		{"mixtral-8x7b, much", "mixtral-8x7b", "hbm=80GiB,host=512GiB,nodata,virtual", nil, 32768, true},
		{"qwen3-30b-a3b", "qwen3-30b-a3b", "hbm=16GiB,host=128GiB,nodata,virtual", nil, 40960, true},
		{"phi-3.5-moe", "phi-3.5-moe", "hbm=48GiB,host=128GiB,nodata,virtual", nil, 131072, true},
		{"a part of the context", "phi-3.5-moe", "hbm=16GiB,host=128GiB,nodata,virtual", nil, -1, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := configs.Defaults()
			s.Model.Name, s.Device.Emulate = c.model, c.emulate
			if c.change != nil {
				c.change(&s)
			}
			in := inspected(t, s)
			if in.Problem == nil {
				t.Fatal("it fits without advice")
			}
			text := in.Problem.Error()
			with, tokens := follow(t, s, text)
			all := float64(in.Sizes.ExpertCount)
			if in = inspected(t, with); in.Problem != nil || in.KV.MaxModelLen < tokens {
				t.Errorf("%s\nfollowed: a context of %d, %v", text, in.KV.MaxModelLen, in.Problem)
			}
			if c.context >= 0 && tokens != c.context || c.context < 0 && (tokens == 0 || tokens >= in.Config.MaxPositions) {
				t.Errorf("%s\npromises a context of %d, want %d", text, tokens, c.context)
			}
			if c.minimal && with.Offload.Fraction > 0 {
				with.Offload.Fraction = (math.Round(with.Offload.Fraction*all) - 1) / all
				if in := inspected(t, with); in.Problem == nil && in.KV.MaxModelLen >= tokens {
					t.Errorf("%s\n%v fits, too", text, with.Offload.Fraction)
				}
			}
			if !strings.Contains(text, "use --policy auto") {
				t.Fatalf("%s\ndoes not name --policy auto", text)
			}
			s.Plan.Policy = configs.PlannedPolicy
			if strings.Contains(text, "in place of --") {
				s.Offload.ResidentExperts, s.Offload.Fraction = "", 0
			}
			if in := inspected(t, s); in.Problem != nil || in.KV.MaxModelLen < min(tokens, 112) {
				t.Errorf("--policy auto: a context of %d, %v", in.KV.MaxModelLen, in.Problem)
			}
		})
	}
}

// Where no fraction helps, the error names the memory that is too small.
func TestAdviceWithoutFraction(t *testing.T) {
	for emulate, want := range map[string]string{
		"hbm=1MiB,host=1GiB": "no offload fraction fits: use more gpu memory (with --max-num-batched-tokens 16 the minimum is ",
		"host=1MiB":          "no offload fraction fits: use more host memory (with --max-num-batched-tokens 16 the minimum is ",
	} {
		s := configs.Defaults()
		s.Device.Emulate = emulate
		text := fmt.Sprint(inspected(t, s).Problem)
		i := strings.Index(text, want)
		if i < 0 {
			t.Errorf("%s: %s", emulate, text)
			continue
		}
		// With the minimum, there is a fraction.
		size, _, _ := strings.Cut(text[i+len(want):], " usable")
		value, err := strconv.ParseFloat(strings.TrimSuffix(size, " MiB"), 64)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if strings.HasPrefix(emulate, "hbm") {
			s.Device.Emulate = fmt.Sprintf("hbm=%dKiB,host=1GiB", int(1024*(value+0.01)/0.9)+1)
		} else {
			s.Device.Emulate = fmt.Sprintf("host=%dKiB", int(1024*(value+0.01))+1)
		}
		if in := inspected(t, s); in.Problem != nil && strings.Contains(in.Problem.Error(), "no offload fraction") {
			t.Errorf("%s: %v", s.Device.Emulate, in.Problem)
		}
	}
}
