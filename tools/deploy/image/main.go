// Command image packs the static binaries into a container image, the one that
// tools/deploy/Dockerfile describes, as an OCI archive for several platforms:
// without Docker, and the same bytes from the same binaries.
//
//	image -name localhost/ebpf-cni:latest -out bin/image.tar amd64=bin/amd64 arm64=bin/arm64
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintf(os.Stderr, "image: %v\n", err)
		}
		os.Exit(1)
	}
}

// platform is one architecture with the directory of its binaries.
type platform struct{ arch, dir string }

func run(args []string, stdout io.Writer) error {
	flags := flag.NewFlagSet("image", flag.ContinueOnError)
	name := flags.String("name", "localhost/ebpf-cni:latest", "name of the image, with its tag")
	version := flags.String("version", "unknown", "version of the binaries, as a label of the image")
	out := flags.String("out", "", "the archive to write")
	if err := flags.Parse(args); err != nil {
		return err
	}
	platforms, err := parse(flags.Args())
	if err != nil {
		return err
	}
	if *out == "" {
		return errors.New("-out: not given; takes the archive to write")
	}
	index, err := build(platforms, *version)
	if err != nil {
		return err
	}
	digest, err := write(*out, *name, index)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "%s: %s %s\n", *out, *name, digest)
	return err
}

func parse(args []string) ([]platform, error) {
	var out []platform
	for _, arg := range args {
		arch, dir, ok := strings.Cut(arg, "=")
		if !ok || arch == "" || dir == "" {
			return nil, fmt.Errorf("%q is no ARCH=DIRECTORY, such as amd64=bin/amd64", arg)
		}
		out = append(out, platform{arch, dir})
	}
	if len(out) == 0 {
		return nil, errors.New("no platform given; takes ARCH=DIRECTORY, such as amd64=bin/amd64")
	}
	return out, nil
}
