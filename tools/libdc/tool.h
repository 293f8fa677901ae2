/* Shared by the command `libdc`. The tool uses the public header and the built library, as any program could.
 *
 *   libdc.c     the commands' table, main
 *   options.c   command lines, read by the table
 *   help.c      help texts, shell completion and the manual page, made from the table
 *   output.c    checked writes to files and standard output
 *   json.c      reading and writing JSON
 *   dumps.c     the flight recorders' files of a folder
 *   diagnose.c  compares them
 *   ranks.c     ranks as threads or processes
 *   checks.c    checks of the machine
 *   selftest.c  collectives and a ZeRO-3 step, to the bit
 *   info.c doctor.c bench.c trace.c torch.c plan/ */
#ifndef DC_TOOL_H
#define DC_TOOL_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "dc_api.h"

#define PRINTF(text, first) __attribute__((format(printf, text, first)))
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* For texts: 1 rank, 2 ranks. */
static inline const char *plural_s(int64_t count) {
  return count == 1 ? "" : "s";
}

/* Exit codes; the help and the manual page have them from exit_codes in help.c. */
enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_UNAVAILABLE = 3 };

/* ---- options.c ---- */

typedef struct option {
  const char *name;     /* "--ranks" */
  const char *argument; /* "N"; NULL: a flag */
  const char *values;   /* "threads|processes": no others are allowed; NULL: any */
  const char *help;
  int numbers; /* most whole numbers with commas between, each from least to most; 0: any text */
  int64_t minimum, maximum;
} option;

enum { MAX_OPTIONS = 13, MAX_NUMBERS = 4 };

typedef struct command command;

/* A command line that was read: the values stand where the table has the options. */
typedef struct args {
  const command *command;
  const char *value[MAX_OPTIONS]; /* NULL: not given; flags have "" */
  const char *operand;
} args;

struct command {
  const char *name;
  const char *operand; /* "FOLDER", "SHELL"; NULL: takes none */
  bool operand_optional;
  const char *operand_values;
  const char *summary;
  const char *text; /* for the help and the manual page; paragraphs end with a newline */
  int (*run)(const args *a);
  option options[MAX_OPTIONS]; /* to the first without a name */
};

extern const command commands[];
extern const int command_count;

/* Reads a command's arguments; an exit code, or -1: go on. A value that its option does not allow is reported
 * here, before the command begins. */
int read_args(const command *c, int argc, char **argv, args *a);
const char *value_of(const args *a, const char *name);
bool has_option(const args *a, const char *option);
/* An option's number, or the fallback. */
int64_t number_of(const args *a, const char *name, int64_t fallback);
/* An option's numbers, or those of the text; returns how many there are, at most the table's. */
int numbers_of(const args *a, const char *name, const char *text, int64_t *numbers);
/* "libdc COMMAND: …" on standard error. Returns code. */
int report_error(const args *a, int code, const char *format, ...) PRINTF(3, 4);
/* ---- output.c ---- */

/* Makes descriptors 0 to 2 refuse what is read or written where the caller closed them, so that no file that is opened
 * later gets their number. */
void reserve_standard_fds(void);
/* Flushes the file; false: errno has the reason. */
bool flush_file(FILE *file);
/* Closes a file that was to be written whole. On failure it is removed, the user is told, and EXIT_UNAVAILABLE
 * returned.
 */
int finish_file(const args *a, FILE *file, const char *path);

/* ---- help.c ---- */

void print_help(const command *c); /* NULL: of libdc itself */
int run_completion(const args *a);
int run_man(const args *a);
int run_help(const args *a);

/* ---- json.c ---- */

/* Writes commas, quotes and braces. key is NULL inside arrays. */
typedef struct json {
  FILE *file;
  int depth;
  bool filled[16]; /* by depth: needs a comma */
} json;

void json_open(json *j, const char *key, char bracket); /* '{' or '[' */
void json_close(json *j, char bracket);                 /* '}' or ']' */
void json_text(json *j, const char *key, const char *text);
void json_int(json *j, const char *key, int64_t number);
void json_number(json *j, const char *key, double number);
void json_bool(json *j, const char *key, bool is);

typedef enum json_kind { J_NULL, J_BOOL, J_NUMBER, J_TEXT, J_ARRAY, J_OBJECT } json_kind;

typedef struct json_value {
  json_kind kind;
  char *key;                /* in an object */
  char *text;               /* J_TEXT */
  int64_t number;           /* J_NUMBER, whole; J_BOOL */
  struct json_value *first; /* members */
  struct json_value *next;
} json_value;

/* The text's value, to be freed by json_free; NULL: error has the reason. The text is changed. */
json_value *json_read(char *text, char *error, size_t error_bytes);
void json_free(json_value *v);
const json_value *json_get(const json_value *object, const char *key); /* NULL: not there */

/* ---- dumps.c ---- */

enum { MAX_RANKS = 1024 }; /* of a group */

typedef struct entry {
  int64_t n, graph, id, tensors, bytes, moved, seq, queued, begin, end;
  const char *op, *name, *dtype, *group, *stream, *state; /* name of the parameter, "" for none */
} entry;

typedef struct dump {
  int rank, world;
  int64_t pid, time, wall, recorded, dropped;
  const char *libdc, *host, *transport, *status, *error;
  entry *entries;
  int64_t count;
  char *file; /* owns the texts */
} dump;

typedef struct dumps {
  dump *ranks; /* in order of rank */
  int count;
  int world;
} dumps;

/* All of folder/rank-*.json, with times of one clock; false: the reason has been printed, with the name of the folder's
 * argument. */
bool dumps_read(const args *a, const char *argument, const char *folder, dumps *d);
void dumps_free(dumps *d);

/* ---- diagnose.c ---- */

enum { SENTENCE = 1024 };

typedef struct diagnosis {
  const char *kind; /* "same", "operation", "missing", "late", "died", "error" */
  char sentence[SENTENCE];
  bool culprits[MAX_RANKS];
} diagnosis;

void diagnose(const dumps *d, diagnosis *v);

/* ---- ranks.c ---- */

typedef struct rank {
  int rank, world;
  dc_comm *comm;
  const char *argument;
  char text[4096]; /* the rank's report: a fault's sentence, or results */
} rank;

/* A rank's work; false: text has the fault. */
typedef bool (*rank_fn)(rank *r);

typedef struct job {
  const char *name;
  rank_fn run;
  bool lasts; /* as long as its argument says: with no deadline of its own */
} job;

const job *find_job(const char *name); /* NULL: none */

/* Runs a job on `world` ranks; text gets rank 0's, or the first failure's. */
bool run_threads(const job *j, int world, const char *argument, char *text, size_t bytes);
bool run_processes(const job *j, int world, const char *argument, char *text, size_t bytes);
/* The main function of a process of run_processes(): argv after "@rank". */
int run_as_rank(int argc, char **argv);
/* Records a failure, with the library's text if a call failed; returns false. */
bool rank_fail(rank *r, const char *format, ...) PRINTF(2, 3);
int64_t now_ns(void);

/* ---- checks.c ---- */

enum { CHECK_OK, CHECK_FAILED, CHECK_ABSENT };

typedef struct finding {
  int state;
  char text[SENTENCE];
} finding;

typedef struct check {
  const char *name; /* NULL: the end of the list */
  void (*run)(finding *f, int ranks);
} check;

extern const check machine_checks[];
void report_finding(finding *f, int state, const char *format, ...) PRINTF(3, 4);

/* ---- the commands ---- */

int run_info(const args *a);
int run_doctor(const args *a);
int run_bench(const args *a);
int run_trace(const args *a);
int run_plan(const args *a);

enum { PLAN_MAX_GIB = 1 << 20 };

/* torch.c: the dumps as PyTorch's flight recorder has them, one file a rank in `folder`. */
int write_torch(const args *a, const dumps *d, const char *folder, bool pickle);

/* selftest.c */

/* A flat tensor of the caller's memory. */
dc_tensor flat(void *data, const int64_t *count, int32_t dtype);
bool check_collectives(rank *r);
bool check_zero3(rank *r);
/* bench.c */
enum { BENCH_MIN_BYTES = 1024 }; /* bytes of the smallest tensor */
bool bench_rank(rank *r);

#endif
