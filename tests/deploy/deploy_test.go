// Package deploy holds what deploy/ has to the tools that read it: Prometheus' parsers, and Helm's
// lint and templates. A module of its own, so that these stay out of moeserve's.
package deploy

import (
	"encoding/json"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v3"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
)

const (
	rules     = "../../deploy/prometheus/rules.yml"
	dashboard = "../../deploy/grafana/moeserve.json"
	chart     = "../../deploy/helm/moeserve"
)

// TestRules: Prometheus loads the alert rules: expressions, templates, durations and labels.
func TestRules(t *testing.T) {
	groups, errs := rulefmt.ParseFile(rules, false, model.UTF8Validation, parser.NewParser(parser.Options{}), slog.New(slog.DiscardHandler))
	for _, err := range errs {
		t.Error(err)
	}
	if groups == nil || len(groups.Groups) == 0 || len(groups.Groups[0].Rules) < 10 {
		t.Error("there are few rules: they are written in another way")
	}
}

// TestDashboard: the expressions of the dashboard are PromQL, with Grafana's variables filled in.
func TestDashboard(t *testing.T) {
	data, err := os.ReadFile(dashboard)
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(data, &d); err != nil {
		t.Fatal(err)
	}
	p, n := parser.NewParser(parser.Options{}), 0
	fill := strings.NewReplacer("$__rate_interval", "5m", "$instance", ".*", "$model", ".*")
	for _, panel := range d.Panels {
		for _, target := range panel.Targets {
			n++
			if _, err := p.ParseExpr(fill.Replace(target.Expr)); err != nil {
				t.Errorf("%s: %v: %s", panel.Title, err, target.Expr)
			}
		}
	}
	if n < 30 {
		t.Errorf("%d expressions: the dashboard is written in another way", n)
	}
}

// values is YAML.
func values(t *testing.T, text string) map[string]any {
	t.Helper()
	v := map[string]any{}
	if err := yaml.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

var settings = []string{"", full, "gpus: {count: 0}\nadmin: {enabled: false}\nreplicas: 2"}

const full = `
image: {tag: v1.2.3}
imagePullSecrets: [{name: pull}]
model: /models/mixtral-8x7b
models: {existingClaim: weights}
settings: {offload-fraction: 0.25, peers: "1", harvest-headroom: 5%, dynamic-residency: true}
gpus: {count: 2}
apiKey: {existingSecret: key}
cache: {existingClaim: kernels}
serviceMonitor: {enabled: true, labels: {release: prometheus}}
serviceAccount: {name: model-server}
podAnnotations: {a: b}
podLabels: {team: x}
runtimeClassName: nvidia
nodeSelector: {gpu: h200}
tolerations: [{key: nvidia.com/gpu, operator: Exists}]
affinity: {nodeAffinity: {}}
extraEnv: [{name: MOESERVE_LOG_FORMAT, value: json}]
service: {annotations: {a: b}, port: 80}
kvEvents: {enabled: true}
`

// TestChartLint: helm lint has nothing to say.
func TestChartLint(t *testing.T) {
	for _, v := range settings {
		for _, m := range lint.All(chart, values(t, v), "default", true).Messages {
			if m.Severity > support.InfoSev {
				t.Errorf("%v\nwith %s", m, v)
			}
		}
	}
}

func render(t *testing.T, text string) (map[string]string, error) {
	t.Helper()
	c, err := loader.LoadDir(chart)
	if err != nil {
		t.Fatal(err)
	}
	v, err := chartutil.ToRenderValues(c, values(t, text), chartutil.ReleaseOptions{Name: "test", Namespace: "default"}, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	return engine.Render(c, v)
}

// TestChart: the manifests are what the values say.
func TestChart(t *testing.T) {
	for _, v := range settings {
		files, err := render(t, v)
		if err != nil {
			t.Fatal(err)
		}
		for name, text := range files {
			if strings.HasSuffix(name, ".txt") {
				continue
			}
			var doc map[string]any
			if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
				t.Errorf("%s: %v\n%s", name, err, text)
			}
		}
		of := func(name string) string { return files["moeserve/templates/"+name] }
		all := map[string][]string{
			"deployment.yaml": {"runAsNonRoot: true", "readOnlyRootFilesystem: true", "path: /health/ready"},
			"configmap.yaml":  {"host: 0.0.0.0", "port: 8000", "drain-timeout: 60"},
		}
		if v == full {
			all["deployment.yaml"] = append(all["deployment.yaml"], "nvidia.com/gpu: 2", "ghcr.io/moeserve/moeserve:v1.2.3", "name: MOESERVE_API_KEY", "claimName: weights", "claimName: kernels", "terminationGracePeriodSeconds: 90", "runtimeClassName: nvidia",
				"containerPort: 5557", "fieldPath: status.podIP", `"replay_endpoint":"tcp://*:5558"`, `"topic":"kv@$(POD_IP):8000@mixtral-8x7b"`)
			all["configmap.yaml"] = append(all["configmap.yaml"], "offload-fraction: 0.25", `peers: "1"`, "harvest-headroom: 5%", "device: cuda", "admin-address: 127.0.0.1:8001", "model: /models/mixtral-8x7b")
			all["servicemonitor.yaml"] = []string{"release: prometheus", "replacement: moeserve"}
		} else if of("servicemonitor.yaml") != "" && strings.TrimSpace(of("servicemonitor.yaml")) != "" {
			t.Error("a ServiceMonitor that nobody asked for")
		}
		for name, parts := range all {
			for _, part := range parts {
				if !strings.Contains(of(name), part) {
					t.Errorf("%s has no %q with %s:\n%s", name, part, v, of(name))
				}
			}
		}
	}
}

// TestChartRefuses: the schema refuses values that are wrong.
func TestChartRefuses(t *testing.T) {
	for _, v := range []string{
		"replica: 2", "replicas: -1", "replicas: two", "gpus: {count: 1.5}", "models: {existingClaim: a, hostPath: /b}", "models: {hostPath: b}",
		"settings: {port: 1}", "settings: {api-key: secret}", "settings: {peers: [1]}", "service: {port: 70000}", "service: {type: Other}",
		"image: {repository: \"\"}", "serviceMonitor: {interval: soon}", "podLabels: {a: 1}", "extraEnv: [{value: x}]", "probes: {startupSeconds: 1}", "kvEvents: {port: 0}",
	} {
		if _, err := render(t, v); err == nil {
			t.Errorf("%s is accepted", v)
		}
	}
}
