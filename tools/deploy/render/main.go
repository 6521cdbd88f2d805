// Command render prints what Helm would apply of the chart: render -chart DIR -set NAME=VALUE,...
// The flags of --set are Helm's, any number of them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"

	"helm.sh/helm/v4/pkg/strvals"

	"github.com/ebpf-cni/ebpf-cni/tools/deploy"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := flag.NewFlagSet("render", flag.ContinueOnError)
	dir, values := flags.String("chart", "chart", "where the chart is"), map[string]any{}
	flags.Func("set", "values, as Helm takes them", func(s string) error { return strvals.ParseInto(s, values) })
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return errors.New("no arguments but flags")
	}
	texts, err := deploy.Render(context.Background(), *dir, values)
	if err != nil {
		return err
	}
	for _, template := range deploy.Templates {
		fmt.Print(texts[template])
	}
	return nil
}
