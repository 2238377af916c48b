package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/serving"
	"github.com/moeserve/moeserve/untrusted"
)

// loadOptions are the flags of bench serve alone.
type loadOptions struct {
	baseURL, endpoint, model, rate, percentiles, csv string
	maxConcurrency                                   int
}

// loadSettings are the settings that bench serve shares with other commands.
var loadSettings = []string{"num-prompts", "input-len", "output-len", "dataset-path", "seed", "temperature", "ignore-eos", "json", "log-level", "log-format"}

func newBenchServe(s *streams) *cobra.Command {
	var o loadOptions
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Measure a server under load: TTFT, TPOT, ITL and throughput",
		Long: `Measure an OpenAI-compatible server (moeserve serve, vLLM, or another) under load:
requests arrive at a rate, as a Poisson process, and stream their completions. Of
each are measured the time to the first token (TTFT), the time per output token after
it (TPOT), the time between chunks (ITL) and the end-to-end latency.

Without --dataset-path, prompts are random ids from the model's vocabulary, for which
the server needs /tokenize; their lengths are distributed as MT-Bench's, or all are
--input-len. The key of MOESERVE_API_KEY, else of OPENAI_API_KEY, is sent if it is set.

Ctrl-C ends the measurement with the requests that have completed.`,
		Example: `  moeserve bench serve --base-url http://127.0.0.1:8000 \
      --request-rate 4 --num-prompts 100
  moeserve bench serve --max-concurrency 8 --input-len 512 --output-len 128 \
      --ignore-eos --csv load.csv`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := readSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			return benchServe(cmd.Context(), s, set, &o)
		},
	}
	addSettings(cmd.Flags(), slices.DeleteFunc(slices.Clone(configs.Schema), func(k configs.Key) bool { return !slices.Contains(loadSettings, k.Name) }))
	f := cmd.Flags()
	f.StringVar(&o.baseURL, "base-url", "http://127.0.0.1:8000", "`URL` of the server, without /v1")
	f.StringVar(&o.endpoint, "endpoint", serving.Completions, "`PATH` of the endpoint: "+strings.Join(serving.Endpoints, " or "))
	f.StringVarP(&o.model, "model", "m", "", "`NAME` of the model on the server; without it, the server's first")
	f.StringVar(&o.rate, "request-rate", "inf", "requests per second, a `RATE`; inf sends all at once")
	f.IntVar(&o.maxConcurrency, "max-concurrency", 0, "maximum `NUMBER` of requests that run at once; 0: no limit")
	f.StringVar(&o.percentiles, "metric-percentiles", "50,90,99", "comma-separated `LIST` of percentiles to report")
	addCSV(cmd, &o.csv)
	return cmd
}

// parse reads the flags.
func (o *loadOptions) parse() (rate float64, percentiles []float64, err error) {
	if u, err := url.Parse(o.baseURL); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return 0, nil, usagef("--base-url is %q: must be a URL such as http://127.0.0.1:8000", o.baseURL)
	}
	if !slices.Contains(serving.Endpoints, o.endpoint) {
		return 0, nil, usagef("--endpoint is %q: must be %s", o.endpoint, strings.Join(serving.Endpoints, " or "))
	}
	if o.rate != "inf" {
		if rate, err = strconv.ParseFloat(o.rate, 64); err != nil || !(rate > 0) || math.IsInf(rate, 0) {
			return 0, nil, usagef("--request-rate is %q: must be a number above 0, or inf", o.rate)
		}
	}
	if o.maxConcurrency < 0 {
		return 0, nil, usagef("--max-concurrency is %d: must be at least 0", o.maxConcurrency)
	}
	for _, text := range strings.Split(o.percentiles, ",") {
		p, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
		if err != nil || !(p > 0 && p < 100) {
			return 0, nil, usagef("--metric-percentiles is %q: must be comma-separated numbers above 0 and below 100", o.percentiles)
		}
		percentiles = append(percentiles, p)
	}
	if o.csv != "" {
		err = writable("--csv", o.csv)
	}
	return rate, percentiles, err
}

func benchServe(ctx context.Context, s *streams, set *settings, o *loadOptions) (err error) {
	rate, percentiles, err := o.parse()
	if err != nil {
		return err
	}
	res, err := openResult(set.Output.JSON, s.out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	c := &serving.Client{BaseURL: o.baseURL, Endpoint: o.endpoint, Model: o.model, APIKey: serverKey()}
	load := serving.Options{
		OutputLen: set.Bench.OutputLen, IgnoreEOS: set.Generate.IgnoreEOS, Temperature: set.Generate.Temperature,
		Rate: rate, MaxConcurrency: o.maxConcurrency, Seed: set.Generate.Seed, Percentiles: percentiles, Run: thisRun(s),
	}
	if c.Model == "" {
		models, err := c.Models(ctx)
		if errors.Is(err, syscall.ECONNREFUSED) {
			return fmt.Errorf("no server listens on %s; start one, or give its --base-url: %w", c.BaseURL, err)
		}
		if err != nil {
			return err
		}
		c.Model = models[0]
	}
	if load.Prompts, err = loadPrompts(ctx, c, set); err != nil {
		return err
	}
	p := s.progress(&set.Output, false)
	defer p.end()
	p.begin("requests", "requests")
	load.Progress = func(done, total int) { p.set("requests", int64(done), int64(total)) }
	r, interrupted := serving.Run(ctx, c, load)
	p.end()
	if interrupted != nil && r.Completed == 0 {
		return interrupted
	}
	var files []outputFile
	if o.csv != "" {
		files = append(files, outputFile{o.csv, func(w io.Writer) error { return serving.WriteCSV(w, &r) }})
	}
	written := writeAll(s, res, r, files, func(w io.Writer) error { return serving.WriteTable(w, &r) })
	return errors.Join(written, interrupted)
}

// serverKey is the key that the environment has for servers.
func serverKey() string {
	if key := os.Getenv("MOESERVE_API_KEY"); key != "" {
		return key
	}
	return os.Getenv("OPENAI_API_KEY")
}

// loadPrompts reads the prompts, or makes random ones of the model's vocabulary.
func loadPrompts(ctx context.Context, c *serving.Client, set *settings) ([]serving.Prompt, error) {
	n := set.Bench.NumPrompts
	if path := set.Bench.DatasetPath; path != "" {
		texts, err := readTexts(path)
		if err != nil {
			return nil, err
		}
		prompts := make([]serving.Prompt, n)
		for i := range prompts {
			prompts[i].Text = texts[i%len(texts)]
		}
		return prompts, nil
	}
	if c.Endpoint == serving.ChatCompletions {
		return nil, usagef("--endpoint %s needs text: give prompts with --dataset-path", c.Endpoint)
	}
	vocabulary, err := c.Vocabulary(ctx)
	var refused *serving.StatusError
	if errors.As(err, &refused) {
		return nil, fmt.Errorf("random prompts need the server's tokenizer: %w; give prompts with --dataset-path", err)
	}
	if err != nil {
		return nil, err
	}
	return serving.RandomPrompts(n, set.Bench.InputLen, vocabulary, set.Generate.Seed), nil
}

// readTexts reads the prompts of a file.
func readTexts(path string) ([]string, error) {
	data, err := untrusted.ReadFile(path, untrusted.MaxData)
	if err != nil {
		return nil, usagef("--dataset-path: %w", err)
	}
	texts, err := eval.ReadPrompts(bytes.NewReader(data), path)
	return texts, benchError(err)
}
