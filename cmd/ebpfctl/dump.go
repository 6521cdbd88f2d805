package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// everything stands for all maps.
const everything = "all"

// clearScreen moves to the upper left corner and erases all below it.
const clearScreen = "\x1b[H\x1b[J"

// known lists what can be dumped: the maps, and the store of addresses.
func known() []string { return append(observe.Names(), ipamName) }

type dump struct {
	*options
	names    []string
	watch    bool
	interval time.Duration
}

func newDump(o *options) *cobra.Command {
	d := &dump{options: o}
	cmd := &cobra.Command{
		Use:   "dump MAP...",
		Short: "Print the content of maps",
		Long: `Print the content of maps:

  ` + strings.Join(known(), " ") + `
  ` + everything + ` (of these)

As JSON and YAML a map is an array of objects: key and value in one, with the
names that bpftool prints; several maps are an object by map name. What is
absent, such as an IPv6 address that a pod does not have, is an empty string.
What is a pod's also has what Kubernetes calls that pod: pod_namespace, pod_name
and pod_uid, as the container runtime has passed them to the plugin.
What is a Service's also has service_namespace, service_name and
service_port_name, and services how many endpoints there are anywhere (cluster)
and on this node alone (local), of those that may be used. An address without a
port stands for all ports of it that no Service has; a NodePort has the address
0.0.0.0 or ::, in tables *.
JSON has the fields in the record's order, YAML by name.
last_seen and neighbour_checked are CLOCK_MONOTONIC in ns, 0 for never; tables
show last_seen as an age.`,
		Args: cobra.ArbitraryArgs,
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			left := slices.DeleteFunc(append(known(), everything), func(name string) bool { return slices.Contains(args, name) })
			return left, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := d.choose(args); err != nil {
				return err
			}
			return d.run(cmd.Context())
		},
	}
	watch := cli.Bool(&d.watch)
	watch.Takes = "no value, true or false; --interval says how often"
	cli.Define(cmd.Flags(), nil,
		cli.Flag{Name: "watch", Short: "w", Default: "false", Help: "print again and again; as JSON one document a line", Value: watch},
		cli.Flag{Name: "interval", Default: "1s", Help: "how long --watch waits before it prints again", Value: cli.Duration(&d.interval, time.Millisecond)})
	return cmd
}

// choose checks the arguments and keeps each map once, in the order given.
func (d *dump) choose(args []string) error {
	if len(args) == 0 {
		return cli.Misuse("which map? The known ones are %s and %s", strings.Join(known(), ", "), everything)
	}
	for _, a := range args {
		if a != everything && !slices.Contains(known(), a) {
			return cli.Misuse("no map is called %q; the known ones are %s and %s", a, strings.Join(known(), ", "), everything)
		}
	}
	if slices.Contains(args, everything) {
		d.names = known()
		return nil
	}
	for _, a := range args {
		if !slices.Contains(d.names, a) {
			d.names = append(d.names, a)
		}
	}
	return nil
}

func (d *dump) run(ctx context.Context) error {
	for first := true; ; first = false {
		out, err := d.once(first)
		if err != nil {
			return err
		}
		if _, err := d.stdout.Write(out); err != nil {
			return fmt.Errorf("write: %w", err)
		}
		if !d.watch {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(d.interval):
		}
	}
}

// once returns what is printed in one go, so that a redrawn table does not
// flicker and a reader of lines gets whole ones. One map is an array, several
// are an object.
func (d *dump) once(first bool) ([]byte, error) {
	tables := make([]typed.Table, 0, len(d.names))
	for _, name := range d.names {
		t, err := d.table(name)
		if err != nil {
			return nil, err
		}
		tables = append(tables, t)
	}
	var b bytes.Buffer
	var err error
	switch d.output {
	case formatJSON:
		err = d.json(&b, tables)
	case formatYAML:
		if !first {
			b.WriteString("---\n")
		}
		err = d.yaml(&b, tables)
	default:
		if d.watch && d.terminal {
			b.WriteString(clearScreen)
		} else if !first {
			b.WriteByte('\n')
		}
		err = d.text(&b, tables)
	}
	return b.Bytes(), err
}

func (d *dump) table(name string) (typed.Table, error) {
	if name == ipamName {
		return readIPAM(d.stateDir, time.Now())
	}
	return d.reader().Read(name)
}

func (d *dump) text(w io.Writer, tables []typed.Table) error {
	for i, t := range tables {
		if len(tables) > 1 {
			if i > 0 {
				fmt.Fprintln(w)
			}
			fmt.Fprintf(w, "== %s ==\n", t.Name)
		}
		if err := t.WriteText(w); err != nil {
			return err
		}
	}
	return nil
}

func (d *dump) json(b *bytes.Buffer, tables []typed.Table) error {
	if len(tables) == 1 {
		if err := tables[0].WriteJSON(b, d.watch); err != nil {
			return err
		}
		b.WriteByte('\n')
		return nil
	}
	separator := "\n"
	if d.watch {
		separator = ""
	}
	b.WriteString("{" + separator)
	for i, t := range tables {
		fmt.Fprintf(b, "%q: ", t.Name)
		if err := t.WriteJSON(b, d.watch); err != nil {
			return err
		}
		if i < len(tables)-1 {
			b.WriteString(", ")
		}
		b.WriteString(separator)
	}
	b.WriteString("}\n")
	return nil
}

func (d *dump) yaml(b *bytes.Buffer, tables []typed.Table) error {
	// YAML is made of JSON, which has the same data.
	var document bytes.Buffer
	if err := d.json(&document, tables); err != nil {
		return err
	}
	return writeYAML(b, document.Bytes())
}
