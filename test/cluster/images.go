package cluster

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// The images that every node has. There is no registry: pods say imagePullPolicy: Never.
const (
	PauseImage   = "ebpf-cni.test/pause:1"
	AgnhostImage = "ebpf-cni.test/agnhost:1"
	coreDNSImage = "ebpf-cni.test/coredns:1"
	greetImage   = "ebpf-cni.test/greet:1"
)

// images maps their names to the program that is all their content.
var images = map[string]string{PauseImage: "pause", AgnhostImage: "agnhost", coreDNSImage: "coredns", greetImage: "greet"}

// agentFile holds the image of this project, as make image would build it.
const agentFile = "ebpf-cni.tar"

// imageFiles are the names of the files that writeImages writes.
func imageFiles() []string {
	files := []string{agentFile}
	for _, program := range images {
		files = append(files, program+".tar")
	}
	return files
}

// writeImages puts the images together as files that containerd imports.
func (c *Cluster) writeImages() error {
	for tag, program := range images {
		if err := writeArchive(map[string]Image{tag: {Programs: []string{c.Program(program)}}}, c.file(program+".tar")); err != nil {
			return err
		}
	}
	return c.writeAgentImage()
}

// writeAgentImage makes the image of the cluster's copy of the binaries, under the name that the manifest has.
func (c *Cluster) writeAgentImage() error { return c.packAgent(agentFile, AgentImage, c.file("bin")) }

// packAgent has the project's own tool make an image out of the binaries in a directory.
func (c *Cluster) packAgent(file, name, binaries string) error {
	root, err := checkout()
	if err != nil {
		return err
	}
	cmd := exec.Command("go", "run", "./image", "-out", c.file(file), "-name", name, runtime.GOARCH+"="+binaries)
	cmd.Dir = filepath.Join(root, "tools/deploy")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("put image %s together: %w\n%s", name, err, out)
	}
	return nil
}

// AddAgentImage gives every node another image of this project: the binaries in a directory, under a name.
func (c *Cluster) AddAgentImage(ctx context.Context, name, binaries string) error {
	const file = "another.tar"
	if err := c.packAgent(file, name, binaries); err != nil {
		return err
	}
	return c.importEverywhere(ctx, file)
}

// importEverywhere gives every node what a file of the cluster's directory holds.
func (c *Cluster) importEverywhere(ctx context.Context, file string) error {
	for _, m := range c.Nodes {
		if err := c.importImage(ctx, m, file); err != nil {
			return err
		}
	}
	return nil
}

// Image is what an image is made of.
type Image struct {
	// Base is a file of tar that the image stands on; without one there is nothing but Programs.
	Base string
	// Programs are files that lie in the image's root, those that they read among them. The first is its entry point.
	Programs []string
	// Command is what a container runs, or its entry point's arguments, unless the pod has others.
	Command []string
	// Path is where commands are looked for; default the root.
	Path string
}

// AddImages gives every node images, by their names.
func (c *Cluster) AddImages(ctx context.Context, added map[string]Image) error {
	const file = "added.tar"
	if err := writeArchive(added, c.file(file)); err != nil {
		return err
	}
	return c.importEverywhere(ctx, file)
}

// writeArchive puts images together as one file, in which those that stand on the same base share it.
func writeArchive(all map[string]Image, target string) error {
	made, bases := map[name.Tag]v1.Image{}, map[string]v1.Layer{}
	for text, image := range all {
		tag, err := name.NewTag(text)
		if err != nil {
			return fmt.Errorf("put image %s together: %w", text, err)
		}
		if image.Base != "" && bases[image.Base] == nil {
			if bases[image.Base], err = tarball.LayerFromFile(image.Base); err != nil {
				return fmt.Errorf("read the base of image %s: %w", text, err)
			}
		}
		if made[tag], err = image.build(bases[image.Base]); err != nil {
			return fmt.Errorf("put image %s together: %w", text, err)
		}
	}
	if err := tarball.MultiWriteToFile(target, made); err != nil {
		return fmt.Errorf("write the images: %w", err)
	}
	return nil
}

// build puts the image together, on the layer of its base if it has one.
func (i Image) build(base v1.Layer) (v1.Image, error) {
	own, err := i.layer()
	if err != nil {
		return nil, err
	}
	layers := []v1.Layer{own}
	if base != nil {
		layers = []v1.Layer{base, own}
	}
	image, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		return nil, err
	}
	// Without a platform containerd filters the image out.
	file, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	file.OS, file.Architecture = "linux", runtime.GOARCH
	file.Config = v1.Config{Cmd: i.Command, Env: []string{"PATH=" + cmp.Or(i.Path, "/")}}
	if len(i.Programs) > 0 {
		file.Config.Entrypoint = []string{"/" + filepath.Base(i.Programs[0])}
	}
	return mutate.ConfigFile(image, file)
}

// layer holds the programs, and where there is no base the directories that they expect.
func (i Image) layer() (v1.Layer, error) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for _, dir := range []string{"tmp/", "etc/"} {
		if i.Base != "" {
			break
		}
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o1777}); err != nil {
			return nil, err
		}
	}
	for _, program := range i.Programs {
		content, err := os.ReadFile(program)
		if err != nil {
			return nil, err
		}
		if err := w.WriteHeader(&tar.Header{Name: filepath.Base(program), Mode: 0o755, Size: int64(len(content))}); err != nil {
			return nil, err
		}
		if _, err := w.Write(content); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil })
}
