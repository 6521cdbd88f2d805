// Package dockeropts turns flannel's subnet file into options of Docker's daemon, so that containers get their addresses from the
// node's subnet, and links of its MTU. What it writes is what flannel's own script for that, mk-docker-opts.sh, writes.
//
//	subnet, err := dockeropts.Read("/run/flannel/subnet.env")
//	content, err := dockeropts.Options{}.Encode(subnet)
//	err = dockeropts.Write("/run/docker_opts.env", content)
package dockeropts

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"regexp"
	"strconv"

	"github.com/ebpf-cni/ebpf-cni/pkg/install"
)

// DefaultKey is the variable that Docker's units read.
const DefaultKey = "DOCKER_OPTS"

// Options say what is written. The zero value is everything.
type Options struct {
	// Key is the variable with all options; default DefaultKey.
	Key string
	// Before are options that come first in it.
	Before string
	// OnlyIndividual leaves that variable out, OnlyCombined those with one option each.
	OnlyIndividual, OnlyCombined bool
	// WithoutMasquerade leaves out whether Docker masquerades.
	WithoutMasquerade bool
}

// Encode returns the content of a file for Docker's unit.
func (o Options) Encode(subnet Subnet) ([]byte, error) {
	options, err := o.list(subnet)
	if err != nil {
		return nil, err
	}
	key, all := o.Key, o.Before
	if key == "" {
		key = DefaultKey
	}
	if all != "" {
		all += " "
	}
	var out bytes.Buffer
	for _, option := range options {
		if !o.OnlyCombined {
			fmt.Fprintf(&out, "DOCKER_OPT_%s=\"%s\"\n", option.name, option.text)
		}
		all += " " + option.text
	}
	if !o.OnlyIndividual {
		fmt.Fprintf(&out, "%s=\"%s\"\n", key, all)
	}
	return out.Bytes(), nil
}

type option struct{ name, text string }

// list is in the order of the names. All but the subnet may be missing, as in files that are written by hand.
func (o Options) list(subnet Subnet) (options []option, err error) {
	bridge, err := subnet.bridge()
	if err != nil {
		return nil, err
	}
	options = append(options, option{"BIP", "--bip=" + bridge})
	if value := subnet.values["FLANNEL_IPMASQ"]; value != "" && !o.WithoutMasquerade {
		masqueraded, ok := map[string]bool{"true": true, "false": false}[value]
		if !ok {
			return nil, subnet.wrong("FLANNEL_IPMASQ", "true or false")
		}
		// Whoever wrote the file masquerades, or Docker does.
		options = append(options, option{"IPMASQ", fmt.Sprintf("--ip-masq=%t", !masqueraded)})
	}
	if value := subnet.values["FLANNEL_MTU"]; value != "" {
		if !validMTU(value) {
			return nil, subnet.wrong("FLANNEL_MTU", "a number from 68 to 65535")
		}
		options = append(options, option{"MTU", "--mtu=" + value})
	}
	return options, nil
}

// validMTU asks for what IPv4 allows, and for decimal digits alone: to Docker a number that begins with 0 is octal.
func validMTU(value string) bool {
	n, err := strconv.ParseUint(value, 10, 16)
	return err == nil && n >= 68 && value == strconv.FormatUint(n, 10)
}

// Subnet is what a subnet file says.
type Subnet struct {
	path   string
	values map[string]string
}

// bridge is the address of Docker's bridge, with the length of its subnet.
func (s Subnet) bridge() (string, error) {
	value := s.values["FLANNEL_SUBNET"]
	if value == "" {
		return "", fmt.Errorf("%s has no FLANNEL_SUBNET: containers need an IPv4 subnet of the node's own", s.path)
	}
	prefix, err := netip.ParsePrefix(value)
	if err != nil || !prefix.Addr().Is4() || prefix.Addr() == prefix.Masked().Addr() {
		return "", s.wrong("FLANNEL_SUBNET", "an IPv4 address for the bridge and the length of its subnet, such as 10.5.52.1/24")
	}
	return value, nil
}

func (s Subnet) wrong(name, takes string) error {
	return fmt.Errorf("%s has %s=%q: takes %s", s.path, name, s.values[name], takes)
}

// Read reads a subnet file.
func Read(path string) (Subnet, error) {
	content, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Subnet{}, fmt.Errorf("read the subnet file: %w; an agent with --registry=etcd writes it when it has a subnet", err)
	}
	if err != nil {
		return Subnet{}, fmt.Errorf("read the subnet file: %w", err)
	}
	return parse(path, content)
}

// assignment is a line of the file, as a shell takes it, in as far as nothing has to be evaluated: a name, and a value with or without
// quotes, which a remark may follow.
var assignment = regexp.MustCompile(`^\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(?:"([^"$` + "`" + `\\]*)"|'([^']*)'|([^\s"'$` + "`" + `\\;&|<>()#]*))\s*(?:\s#.*)?$`)

var remark = regexp.MustCompile(`^\s*(?:#.*)?$`)

func parse(path string, content []byte) (Subnet, error) {
	subnet := Subnet{path: path, values: map[string]string{}}
	for i, line := range bytes.Split(content, []byte("\n")) {
		if remark.Match(line) {
			continue
		}
		found := assignment.FindSubmatch(line)
		if found == nil {
			return Subnet{}, fmt.Errorf("%s, line %d, is %q: takes NAME=VALUE, which is not evaluated", path, i+1, line)
		}
		subnet.values[string(found[1])] = string(bytes.Join(found[2:], nil))
	}
	return subnet, nil
}

// Write replaces a file, so that nobody reads half of it. What is no regular file, such as /dev/stdout, is written to.
func Write(path string, content []byte) error {
	var err error
	if info, there := os.Stat(path); there == nil && !info.Mode().IsRegular() {
		err = os.WriteFile(path, content, 0o644) //nolint:gosec // no file is made
	} else {
		err = install.Replace(path, 0o644, bytes.NewReader(content))
	}
	if err != nil {
		return fmt.Errorf("write Docker's options: %w", err)
	}
	return nil
}
