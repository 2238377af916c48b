package main

import (
	"errors"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/untrusted"
)

func newBenchPredict(s *streams) *cobra.Command {
	uniform := false
	cmd := &cobra.Command{
		Use:   "predict FILE...",
		Short: "Compare measured steps with the planner's predictions",
		Long: `Compare measured times of steps with what the planner predicts: a line for each, with
the error, and the median and the worst of all.

A FILE is a result of bench throughput --json or bench sweep --json, which has the
predictions of its own run, or has a JSON object a line with the times of steps: model (a
preset), kind (decode or prefill), sequences and seconds, and where they are not the
defaults layers, fraction and tier (of the offloaded experts), access, prompt_tokens (77),
new_tokens (32) and step_tokens (8192). These are predicted for --hardware, which they
need. With experts_used and fetched_bytes, what a router has selected is not predicted but
as it was counted; --uniform-routing leaves it to the prediction.

Nothing is measured and no device is opened.`,
		Example: `  moeserve bench sweep --hardware here.json --json sweep.json
  moeserve bench predict sweep.json
  moeserve bench predict --hardware here.json steps.jsonl`,
		Args: someArguments("a FILE: a result of bench throughput --json or bench sweep --json, or times of steps"),
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := readSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			return benchPredict(s, set, args, uniform)
		},
	}
	addSettings(cmd.Flags(), configs.For("bench predict"))
	cmd.Flags().BoolVar(&uniform, "uniform-routing", false, "predict that every expert is selected equally often, also where it was counted")
	return cmd
}

func benchPredict(s *streams, set *settings, paths []string, uniform bool) (err error) {
	hardware, err := readHardware(set.Plan.Hardware)
	if err != nil {
		return err
	}
	var cells []eval.Predicted
	name := ""
	for _, path := range paths {
		data, err := untrusted.ReadFile(path, untrusted.MaxData)
		if err != nil {
			return usagef("%w", err)
		}
		timings, more, err := eval.ReadTimings(data, path)
		if err != nil {
			return benchError(err)
		}
		if len(timings) > 0 {
			if hardware == nil {
				return usagef("%s has times of steps, which are predicted for a machine: name it with --hardware", path)
			}
			name = hardware.Name
			for i := range timings {
				if uniform {
					timings[i].ExpertsUsed, timings[i].FetchedBytes = 0, 0
				}
			}
			if more, err = eval.Predict(timings, set.predictTiming); err != nil {
				return benchError(err)
			}
		}
		cells = append(cells, more...)
	}
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	p := eval.NewPredictions(thisRun(s), name, cells)
	return writeAll(s, res, p, nil, func(w io.Writer) error { return eval.WritePredictions(w, p) })
}

// predictTiming predicts a timing for the hardware that the settings name.
func (s *settings) predictTiming(t *eval.Timing) (r planner.Prediction, err error) {
	own := s.Settings
	own.Model.Name, own.Model.LoadFormat, own.Model.NumHiddenLayers = t.Model, configs.LoadDummy, t.Layers
	own.Offload.Fraction, own.Offload.Tier, own.Batch.ExpertAccess = t.Fraction, t.Tier, t.Access
	if own.Offload.Tier == configs.NoTier {
		own.Offload.Tier = configs.HostTier
	}
	if t.Tier == configs.PeerTier {
		own.Device.Peers = "1"
	}
	model, err := checkpoint.Open(own.Model, own.Generate.Seed)
	if err != nil {
		return r, usagef("%w", err)
	}
	defer func() { err = errors.Join(err, model.Close()) }()
	if n := model.Config.Layers; own.Model.NumHiddenLayers > n {
		return r, usagef("it has %d layers, and %s has %d", own.Model.NumHiddenLayers, model.Name, n)
	}
	p, err := planning.NewNamed(model, planning.NamedOptions{
		Settings: &own, Workload: planner.Workload{PromptTokens: t.PromptTokens, NewTokens: t.NewTokens},
	})
	if err != nil {
		return r, err
	}
	if t.Kind == eval.DecodeKind {
		p.Routing = planner.Routing{Decode: t.ExpertsUsed, Fetched: t.FetchedBytes}
	} else {
		p.Routing.Prefill = t.ExpertsUsed
	}
	return p.Static(t.Sequences, t.StepTokens)
}
