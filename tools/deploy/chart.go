// Package deploy renders the chart, of which the manifests are one rendering.
package deploy

import (
	"context"
	"fmt"
	"path"
	"strings"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
)

// Templates are those of the chart, in the order in which they are applied.
var Templates = []string{"agent.yaml", "cleanup.yaml"}

// Render returns what Helm makes of the chart in dir for a release of its own name in kube-system, by template. What
// renders to nothing is left out.
func Render(ctx context.Context, dir string, values map[string]any) (map[string]string, error) {
	chart, err := loader.Load(dir)
	if err != nil {
		return nil, err
	}
	release := common.ReleaseOptions{Name: "ebpf-cni", Namespace: "kube-system"}
	all, err := util.ToRenderValues(chart, values, release, common.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	rendered, err := engine.Engine{Strict: true}.RenderWithContext(ctx, chart, all)
	if err != nil {
		return nil, err
	}
	texts := map[string]string{}
	for _, template := range Templates {
		text, ok := rendered[path.Join(chart.Name(), "templates", template)]
		if !ok {
			return nil, fmt.Errorf("the chart has no template %s", template)
		}
		if text = strings.TrimSpace(text); text != "" {
			texts[template] = text + "\n"
		}
	}
	return texts, nil
}
