/* libdc, the command line: the table of its commands, from which help, completion and parsing are made. */
#include <errno.h>
#include <string.h>

#include "tool.h"

/* An entry of the table of options. */
#define FLAG(name, help) \
  { name, NULL, NULL, help, 0, 0, 0 }
#define TEXT(name, argument, help) \
  { name, argument, NULL, help, 0, 0, 0 }
#define ONE_OF(name, argument, values, help) \
  { name, argument, values, help, 0, 0, 0 }
#define NUMBER(name, argument, minimum, maximum, help) \
  { name, argument, NULL, help, 1, minimum, maximum }
#define NUMBERS(name, minimum, maximum, help) \
  { name, "LIST", NULL, help, MAX_NUMBERS, minimum, maximum }
#define JSON_OPTION FLAG("--json", "prints JSON")

const command commands[] = {
    {.name = "info",
     .summary = "names the library, what it can use here, and the machine's limits",
     .text = "Version and place of the library, devices and communicators with the reason where one is not here, the\n"
             "instruction set that its kernels use, and what the system allows. Nothing is tested; see libdc doctor.\n",
     .run = run_info,
     .options = {JSON_OPTION}},
    {.name = "doctor",
     .summary = "tests whether libdc works here, or tells from dumps which rank failed how",
     .text = "Without --dump: checks clock, memory, files, shared memory, streams, collectives and a ZeRO-3 step on\n"
             "ranks that are threads and processes, each result to the bit, and the Python package and the PyTorch\n"
             "adapter where they are installed. It takes less than two minutes and names the part that is broken.\n"
             "\n"
             "With --dump: reads the flight recorders' files of all ranks, which dc_context_trace_dump() writes, or\n"
             "at an error dc_context_trace_dump_on_error() and, for the Python package, LIBDC_DUMP_DIR. It says in\n"
             "a sentence which rank did what differently.\n",
     .run = run_doctor,
     .options = {TEXT("--dump", "FOLDER", "reads FOLDER/rank-*.json instead of testing"),
                 NUMBER("--ranks", "N", 1, 8, "ranks of the tests, 1 to 8; 2 without it"), JSON_OPTION}},
    {.name = "bench",
     .summary = "measures collectives and operators against memcpy",
     .text = "Each collective takes turns with a memcpy of as many bytes as the whole tensor has, on every rank at\n"
             "once; the figures are medians of the turns, and \"of memcpy\" is the copy's time over the collective's.\n"
             "Operators: a ZeRO-3 gather (start, wait, release), a gradient (reduce, end of backward), and a gather\n"
             "of what is there already.\n",
     .run = run_bench,
     .options = {NUMBER("--ranks", "N", 1, 64, "1 to 64; 2 without it"),
                 ONE_OF("--transport", "HOW", "threads|processes", "what the ranks are; processes without it"),
                 NUMBER("--bytes", "N", BENCH_MIN_BYTES, 1 << 30,
                        "the largest tensor, 1024 to 1073741824; 16777216 without it"),
                 NUMBER("--turns", "N", 3, 10001, "of each measurement, 3 to 10001; 31 without it"), JSON_OPTION}},
    {.name = "plan",
     .operand = "WHAT",
     .operand_values = "layer",
     .summary = "counts the memory of training before anything is made",
     .text =
         "layer: the largest micro-batch of a stack of transformer layers, for each of the layer's memory flags, with\n"
         "libdc's layer and with DeepSpeed's by its own inventory; for BERT-large also beside the table of\n"
         "DeepSpeed's tutorial, with where and why they differ. Model states are counted by stage and optimizer.\n"
         "\n"
         "Other models are planned by the Python package: libdc plan MODEL, for instance a config.json.\n",
     .run = run_plan,
     .options =
         {ONE_OF("--model", "NAME", "bert-base|bert-large", "bert-large without it; the next four replace its sizes"),
          NUMBER("--layers", "N", 1, INT32_MAX, "how many layers"),
          NUMBER("--hidden", "N", 1, 1 << 17, "features of a token"),
          NUMBER("--heads", "N", 1, 1 << 17, "divides --hidden"),
          NUMBER("--intermediate", "N", 1, INT32_MAX, "features between; with --hidden, 4 times that without it"),
          NUMBERS("--memory", 1, PLAN_MAX_GIB, "up to 4 sizes in GiB with commas between; 16,32 without it"),
          NUMBERS("--seq", 1, 1 << 24, "up to 4 lengths with commas between; 128,512 without it"),
          ONE_OF("--dtype", "TYPE", "float32|float16|bfloat16", "of weights and activations; float16 without it"),
          ONE_OF("--optimizer", "NAME", "adam|momentum|sgd", "adam without it, and for LAMB"),
          NUMBER("--stage", "N", 0, 3, "of ZeRO, 0 to 3; 0 without it"),
          NUMBER("--ranks", "N", 1, INT32_MAX, "among which ZeRO shards; 1 without it"),
          NUMBER("--other", "GIB", 0, PLAN_MAX_GIB, "taken by what is not counted; 0 without it"), JSON_OPTION}},
    {.name = "trace",
     .operand = "FOLDER",
     .summary = "turns the flight recorders' dumps into a trace",
     .text = "Reads FOLDER/rank-*.json. The format perfetto is Chrome's JSON for https://ui.perfetto.dev: ranks are\n"
             "processes, streams are threads. The format torch writes what torchfrtrace, PyTorch's analyser of flight\n"
             "recorders, reads: a file a rank, pickled; torch-json is the same as JSON.\n",
     .run = run_trace,
     .options = {TEXT("--output", "PATH", "a file, for torch a folder; -o is short for it; else standard output"),
                 ONE_OF("--format", "FORMAT", "perfetto|torch|torch-json", "perfetto without it"),
                 FLAG("--json", "prints what was written as JSON")}},
    {.name = "help",
     .operand = "COMMAND",
     .operand_optional = true,
     .operand_values = "info|doctor|bench|plan|trace|help|completion|man",
     .summary = "explains a command, or lists them",
     .text = "The same as libdc COMMAND --help; without COMMAND the same as libdc --help.\n",
     .run = run_help},
    {.name = "completion",
     .operand = "SHELL",
     .operand_values = "bash|zsh|fish",
     .summary = "prints the completion script of a shell",
     .text = "For bash: source <(libdc completion bash). For fish: libdc completion fish | source.\n",
     .run = run_completion},
    {.name = "man", .summary = "prints the manual page", .text = "As roff: libdc man | man -l -\n", .run = run_man},
};
const int command_count = COUNT(commands);

static int unknown_command(const char *name) {
  fprintf(stderr, "libdc: COMMAND = %s, must be ", name);
  for (int i = 0; i < command_count; i++) {
    fprintf(stderr, "%s%s", i == 0 ? "" : i == command_count - 1 ? " or " : ", ", commands[i].name);
  }
  fputc('\n', stderr);
  return EXIT_USAGE;
}

static int run_command(int argc, char **argv) {
  const bool version = argc > 1 && (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-V") == 0);
  const bool help = argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
  if ((version || help) && argc > 2) {
    fprintf(stderr, "libdc: %s is one argument too many after %s\n", argv[2], argv[1]);
    return EXIT_USAGE;
  }
  if (version) {
    printf("libdc %s\n", dc_version_string());
    return EXIT_OK;
  }
  if (argc < 2 || help) {
    print_help(NULL);
    return argc < 2 ? EXIT_USAGE : EXIT_OK;
  }
  if (strcmp(argv[1], "@rank") == 0) { /* one of run_processes() */
    return run_as_rank(argc - 2, argv + 2);
  }
  for (int i = 0; i < command_count; i++) {
    if (strcmp(argv[1], commands[i].name) == 0) {
      args a;
      int code = read_args(&commands[i], argc - 2, argv + 2, &a);
      return code >= 0 ? code : commands[i].run(&a);
    }
  }
  return unknown_command(argv[1]);
}

/* Fails if the output could not be written, for instance on a full disk. */
int main(int argc, char **argv) {
  reserve_standard_fds();
  int code = run_command(argc, argv);
  if (!flush_file(stdout)) {
    fprintf(stderr, "libdc: standard output can't be written: %s\n", strerror(errno));
    return EXIT_UNAVAILABLE;
  }
  return code;
}
