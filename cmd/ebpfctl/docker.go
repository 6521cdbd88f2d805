package main

import (
	"regexp"

	"github.com/spf13/cobra"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
	"github.com/ebpf-cni/ebpf-cni/pkg/dockeropts"
)

type dockerOpts struct {
	*options
	from, to, key                  string
	individual, combined, maskless bool
}

func newDockerOpts(o *options) *cobra.Command {
	d := &dockerOpts{options: o}
	cmd := &cobra.Command{
		Use:   "docker-opts",
		Short: "Write Docker's options for this node's subnet",
		Long: `Write the options by which Docker's bridge gets this node's subnet and MTU, as
flannel's mk-docker-opts.sh does: with its flags, by default to its file. Options
that the combined variable already has in the environment come first.

When the subnet file can't be followed, the file that is there stays.`,
		Example: "  ebpfctl docker-opts -d /run/flannel/docker -k DOCKER_NETWORK_OPTIONS",
		Args:    cobra.NoArgs,
		RunE:    func(*cobra.Command, []string) error { return d.run() },
	}
	cli.Define(cmd.Flags(), nil,
		cli.Flag{Name: "subnet-file", Short: "f", Default: "/run/flannel/subnet.env", Help: "where the agent, or flannel, has written this node's subnet", Value: file(&d.from)},
		cli.Flag{Name: "docker-file", Short: "d", Default: "/run/docker_opts.env", Help: "the file to write, for EnvironmentFile= of Docker's unit", Value: file(&d.to)},
		cli.Flag{Name: "individual", Short: "i", Default: "false", Help: "a variable for each option, such as DOCKER_OPT_MTU; without this and --combined both are written", Value: cli.Bool(&d.individual)},
		cli.Flag{Name: "combined", Short: "c", Default: "false", Help: "one variable with all options", Value: cli.Bool(&d.combined)},
		cli.Flag{Name: "no-ip-masq", Short: "m", Default: "false", Help: "leave --ip-masq out, for a Docker that does not know it", Value: cli.Bool(&d.maskless)},
		cli.Flag{Name: "combined-key", Short: "k", Default: dockeropts.DefaultKey, Help: "name of the variable with all options", Value: variable(&d.key)})
	return cmd
}

func (d *dockerOpts) run() error {
	subnet, err := dockeropts.Read(d.from)
	if err != nil {
		return err
	}
	before, _ := d.lookup(d.key)
	content, err := dockeropts.Options{
		Key: d.key, Before: before, WithoutMasquerade: d.maskless,
		OnlyIndividual: d.individual && !d.combined, OnlyCombined: d.combined && !d.individual,
	}.Encode(subnet)
	if err != nil {
		return err
	}
	return dockeropts.Write(d.to, content)
}

// file is the path of a file.
func file(into *string) cli.Value {
	return cli.Value{Arg: "FILE", Takes: "the path of a file", Set: func(s string) error {
		if s == "" {
			return cli.ErrTakes
		}
		*into = s
		return nil
	}}
}

var variableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// variable is the name of an environment variable.
func variable(into *string) cli.Value {
	return cli.Value{Arg: "NAME", Takes: "the name of an environment variable", Set: func(s string) error {
		if !variableName.MatchString(s) {
			return cli.ErrTakes
		}
		*into = s
		return nil
	}}
}
